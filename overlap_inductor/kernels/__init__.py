# SPDX-License-Identifier: Apache-2.0
"""Triton kernels, and the layout of the memory that they share with the host (``layout``). The kernels import no FX.
Within the package, only ``lowerings`` and ``transports`` import the kernels; ``runtime`` imports ``layout``."""
