# SPDX-License-Identifier: Apache-2.0
"""Schedule ``ring`` cuts a site into pieces, so that the transfer of one piece runs under the matmul of another.

In each step, a piece is multiplied while others are sent and received. The steps are unrolled in the graph, or one op
loops over them.

- Ops: the ops of unrolled steps, such as ``gather_step``, are in ``ops``. ``all_gather_matmul``,
  ``matmul_reduce_scatter``, ``matmul_all_reduce`` and ``matmul_all_gather`` are in ``looped_gather_ops`` and
  ``looped_reduce_ops``. ``grouped_matmul_reduce_scatter`` and ``grouped_matmul_all_reduce`` are in
  ``looped_grouped_ops``. ``matmul_all_to_all`` and ``all_to_all_matmul`` are in ``looped_exchange_ops``, and
  ``all_to_all_experts`` is in ``looped_experts_ops``. For parts of different sizes, ``matmul_all_to_all_uneven`` and
  ``all_to_all_uneven_matmul`` are in ``looped_uneven_ops``. Attention and lookups in tables have no looping op.
- Kernels: none. Inductor's own matmul computes each piece of an unrolled ring. The vendor's matmul computes each piece
  of a looping op.
- Tests: ``tests/compile/test_golden.py`` (graphs), ``tests/numerics/test_random_programs.py`` (numbers),
  ``tests/gpu/check_ring.py``. For attention, ``tests/compile/test_attention_graph.py``,
  ``tests/numerics/test_context_parallel.py`` and ``tests/gpu/check_attention.py``.
"""
