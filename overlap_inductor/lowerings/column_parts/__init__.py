# SPDX-License-Identifier: Apache-2.0
"""Schedule ``column_parts``: the last grouped matmul of an expert layer, and the sum of each token's rows, are computed
for a part of the output columns at a time. The program's own all-reduce adds a part's sums over the ranks while the
next part is computed.

- Ops: none of its own. ``after`` of ``ring.ops`` puts a part's matmul after the start of the all-reduce before it.
  ``control_deps`` puts the waits after the last start.
- Kernels: none.
- Tests: ``tests/compile/test_column_parts.py`` (graphs, plans), ``tests/numerics/test_column_parts.py`` (numbers).
"""
