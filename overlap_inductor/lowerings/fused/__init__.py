# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused``: one persistent Triton kernel per site.

- Ops: ``fused_<pattern>``, ``fused_<pattern>_epilogue`` and ``fused_contracted_all_to_all_matmul`` in ``ops``;
  ``fused_embedding_all_to_all`` in ``table_ops``.
- Kernels: ``kernels/all_gather_matmul.py``, ``kernels/all_gather_matmul_slices.py``, ``kernels/push.py``,
  ``kernels/matmul_reduce_scatter.py``, ``kernels/matmul_all_reduce.py``, ``kernels/epilogue.py``,
  ``kernels/receive.py``, ``kernels/all_to_all_contraction.py``, ``kernels/embedding_all_to_all.py``.
- Tests: ``tests/compile/test_fused_graph.py`` (graphs), ``tests/kernels/test_fused.py`` and
  ``tests/kernels/test_fused_sites.py`` (numbers), ``tests/gpu/check_fused.py``. For all-to-alls also
  ``tests/compile/test_fused_exchanges.py`` and ``tests/kernels/test_fused_exchanges.py``. For tables:
  ``tests/compile/test_fused_tables.py``, ``tests/kernels/test_tables.py``, ``tests/kernels/test_table_sites.py``,
  ``tests/gpu/check_tables.py``.
"""
