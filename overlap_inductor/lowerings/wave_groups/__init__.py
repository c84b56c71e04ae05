# SPDX-License-Identifier: Apache-2.0
"""Schedule ``wave_groups``: one matmul runs in groups of waves, and a collective moves the tiles of each group.

- Ops: ``wave_groups_<pattern>`` in ``ops``.
- Kernels: ``kernels/wave_groups.py``.
- Tests: ``tests/kernels/test_wave_groups.py`` (numbers), ``tests/gpu/check_wave_groups.py``.
"""
