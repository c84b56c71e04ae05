# SPDX-License-Identifier: Apache-2.0
"""Triton kernels. They import no FX, and only ``lowerings``, ``transports`` and the tests import them."""
