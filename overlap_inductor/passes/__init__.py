# SPDX-License-Identifier: Apache-2.0
"""The steps of the overlap pass (find sites, check, plan, rewrite), and the sequence-parallel rewrite before it."""
