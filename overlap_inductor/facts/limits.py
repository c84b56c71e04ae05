# SPDX-License-Identifier: Apache-2.0
"""Limits that both the graph's side and the kernels keep."""

from __future__ import annotations

MOST_EXTRAS = 2
"""Extra tensors that the epilogues of one launch may read."""
