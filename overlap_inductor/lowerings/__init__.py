# SPDX-License-Identifier: Apache-2.0
"""lowerings of overlap_inductor (import-light: import the modules you need)."""
