# SPDX-License-Identifier: Apache-2.0
"""Schedule ``fused``: one persistent Triton kernel per site.

- Ops: ``fused_<pattern>`` and ``fused_<pattern>_epilogue`` in ``ops``.
- Kernels: ``kernels/all_gather_matmul.py``, ``kernels/all_gather_matmul_slices.py``, ``kernels/push.py``,
  ``kernels/matmul_reduce_scatter.py``, ``kernels/matmul_all_reduce.py``, ``kernels/epilogue.py``.
- Tests: ``tests/compile/test_fused_graph.py`` (graphs), ``tests/kernels/test_fused.py`` and
  ``tests/kernels/test_fused_sites.py`` (numbers), ``tests/gpu/check_fused.py``.
"""
