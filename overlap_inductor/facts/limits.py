# SPDX-License-Identifier: Apache-2.0
"""Limits that the graph passes and the kernels share."""

from __future__ import annotations

MOST_EXTRAS = 2
"""All epilogues of one kernel launch together read at most this many extra tensors. An extra tensor is an input of an
epilogue other than the matmul's result."""
