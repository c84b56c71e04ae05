# SPDX-License-Identifier: Apache-2.0
"""Schedule ``wave_groups``: a collective for each group of waves of one matmul.

- Ops: ``wave_groups_<pattern>`` in ``ops``.
- Kernels: ``kernels/wave_groups.py``.
- Tests: ``tests/kernels/test_wave_groups.py`` (numbers), ``tests/gpu/check_wave_groups.py``.
"""
