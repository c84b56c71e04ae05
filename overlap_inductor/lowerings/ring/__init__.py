# SPDX-License-Identifier: Apache-2.0
"""Schedule ``ring`` cuts a site into steps, so that each transfer runs under the matmul of another piece.

The steps send and receive. They are unrolled in the graph, or looped in one op.

- Ops: the unrolled steps' ops, e.g. ``gather_step``, in ``ops``; ``all_gather_matmul``, ``matmul_reduce_scatter``,
  ``matmul_all_reduce`` and ``matmul_all_gather`` in ``looped_gather_ops`` and ``looped_reduce_ops``.
- Kernels: none. Inductor's own matmul computes each piece.
- Tests: ``tests/compile/test_spellings.py`` (graphs), ``tests/numerics/test_random_programs.py`` (numbers),
  ``tests/gpu/check_ring.py``.
"""
