# SPDX-License-Identifier: Apache-2.0
"""Torch's functions for quotients and remainders of symbolic sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.utils._sympy.functions import CleanDiv
from torch.utils._sympy.functions import FloorDiv
from torch.utils._sympy.functions import Mod
from torch.utils._sympy.functions import PythonMod

BINARY: dict[Any, Callable[[Any, Any], Any]] = {
    FloorDiv: operator.floordiv,
    CleanDiv: operator.floordiv,
    Mod: operator.mod,
    PythonMod: operator.mod,
}
"""Python's operator for each function of two sizes."""
