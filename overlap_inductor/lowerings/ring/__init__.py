# SPDX-License-Identifier: Apache-2.0
"""Schedule ``ring`` cuts a site into pieces, so that the transfer of one piece runs under the matmul of another.

The steps are unrolled in the graph, or one op loops over them.

- Ops of unrolled steps, such as ``gather_step``: ``ops``.
- Looping ops: ``looped_gather_ops``, ``looped_reduce_ops``, ``looped_grouped_ops`` (sums of experts),
  ``looped_exchange_ops`` (all-to-alls), ``looped_uneven_ops`` (parts of different sizes) and ``looped_experts_ops``.
  Attention and lookups in tables have none.
- Kernels: none. Inductor's matmul computes the pieces of unrolled steps, the vendor's matmul those of a looping op.
- Tests: ``tests/compile/test_golden.py`` (graphs), ``tests/numerics/test_random_programs.py`` (numbers),
  ``tests/gpu/check_ring.py``. For attention, ``tests/compile/test_attention_graph.py``,
  ``tests/numerics/test_context_parallel.py`` and ``tests/gpu/check_attention.py``.
"""
