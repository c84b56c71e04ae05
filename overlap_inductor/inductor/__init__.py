# SPDX-License-Identifier: Apache-2.0
"""Where ``torch.compile`` and this package call each other: Inductor's pass slots, its functions that this package
wraps, and calls of compiled graphs."""
