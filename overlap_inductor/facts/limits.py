# SPDX-License-Identifier: Apache-2.0
"""Limits that the graph passes and the kernels share."""

from __future__ import annotations

MOST_EXTRAS = 2
"""The largest number of extra tensors that all epilogues of one launch may read together."""
