# SPDX-License-Identifier: Apache-2.0
"""Schedule ``early_start``: the program's own exchange of keys and values runs under an attention that does not need
its result. The exchange starts before the attention, and the wait stands behind it.

- Ops: none of its own. ``after`` of ``ring.ops`` puts the attention behind the start, and ``control_deps`` puts the
wait behind the attention.
- Kernels: none.
- Tests: ``tests/compile/test_rotated_attention_graph.py`` (graphs), ``tests/numerics/test_rotated_attention.py``
(numbers).
"""
