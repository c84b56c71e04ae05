# SPDX-License-Identifier: Apache-2.0
"""Schedule ``small_message``: one kernel all-reduces few tokens through the peers' memory. It can also compute the norm
that follows.

- Ops: ``small_message_matmul_all_reduce`` and ``small_message_matmul_all_reduce_norm`` in ``ops``.
- Kernels: ``kernels/small_message.py``.
- Tests: ``tests/compile/test_small_graph.py`` (graphs), ``tests/kernels/test_small_message.py`` and
  ``tests/kernels/test_small_sites.py`` (numbers), ``tests/gpu/check_small_message.py``.
"""
