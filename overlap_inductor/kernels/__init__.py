"""Triton kernels. Nothing here imports FX, and nothing outside ``lowerings`` and the tests imports this."""
