"""Triton kernels. Nothing here imports FX, and nothing outside ``lowerings``, ``transports`` and the tests imports
this."""
