# SPDX-License-Identifier: Apache-2.0
"""The functions of torch that occur in symbolic sizes, besides sums and products."""

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
