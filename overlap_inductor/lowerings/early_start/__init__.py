# SPDX-License-Identifier: Apache-2.0
"""Schedule ``early_start``: the program's own exchange of keys and values runs under an attention that does not need
the exchanged blocks. The exchange starts before the attention, and its wait comes after the attention.

- Ops: none of its own. ``after`` of ``ring.ops`` puts the attention after the start of the exchange. ``control_deps``
  puts the wait after the attention.
- Kernels: none.
- Tests: ``tests/compile/test_rotated_attention_graph.py`` (graphs), ``tests/numerics/test_rotated_attention.py``
  (numbers), ``tests/gpu/check_rotated_attention.py``.
"""
