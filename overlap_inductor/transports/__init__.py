# SPDX-License-Identifier: Apache-2.0
"""transports of overlap_inductor (import-light: import the modules you need)."""
