# SPDX-License-Identifier: Apache-2.0
"""Code shared by the schedules that write each site as one op."""
