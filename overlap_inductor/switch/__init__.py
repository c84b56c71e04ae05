# SPDX-License-Identifier: Apache-2.0
"""How a user turns the pass on: entry points, ``enable`` and ``disable``, the backend, ``explain``."""
