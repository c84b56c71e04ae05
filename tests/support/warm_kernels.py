# SPDX-License-Identifier: Apache-2.0
"""Prepares interpreted kernels in the process that imports this module. Ranks are forked from this process."""

from __future__ import annotations

import importlib
import pkgutil

from overlap_inductor import kernels
from tests.support.cheap_interpreter import interpret_cheaply
from tests.support.cheap_interpreter import rewrite_kernels

interpret_cheaply()
for _, name, _ in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
    importlib.import_module(name)
rewrite_kernels()
