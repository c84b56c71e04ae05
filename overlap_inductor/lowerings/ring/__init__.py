# SPDX-License-Identifier: Apache-2.0
"""Schedule ``ring`` cuts a site into pieces, so that the transfer of one piece runs under the matmul of another.

The steps are unrolled in the graph, or one op loops over them.

- Ops: ``ops`` has those of unrolled steps, such as ``gather_step``. ``looped_*_ops`` have the looping ops, named after
  patterns: ``all_gather_matmul``, ``matmul_reduce_scatter``, ``matmul_all_reduce``, ``matmul_all_gather``,
  ``matmul_all_to_all``, ``all_to_all_matmul`` and ``all_to_all_experts``. An op ``grouped_...`` sums experts' rows.
  Ops with ``uneven`` in their names take parts of different sizes.
- Kernels: none. Inductor's matmul computes the pieces of unrolled steps, the vendor's matmul those of a looping op.
- Tests: ``tests/compile/test_golden.py`` (graphs), ``tests/numerics/test_random_programs.py`` (numbers),
  ``tests/gpu/check_ring.py``. For attention, ``tests/compile/test_attention_graph.py``,
  ``tests/numerics/test_context_parallel.py`` and ``tests/gpu/check_attention.py``.
"""
