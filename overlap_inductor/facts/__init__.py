# SPDX-License-Identifier: Apache-2.0
"""Plain data about sites, plans, machines and exchanges. No module here imports another folder of the package when it
is loaded."""
