# SPDX-License-Identifier: Apache-2.0
"""Lists the functions for which Dynamo holds compiled code."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType

import torch


def compiled_by_inductor() -> list[str]:
    """The functions for which Dynamo holds code of Inductor, such as ``Block.forward (model.py:12)``, in the order of
    their first compile. Does not import ``torch._dynamo``."""
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    if convert_frame is None:
        return []
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    found = []
    for reference in list(convert_frame.input_codes.seen):
        code = reference()
        entries = _debug_get_cache_entry_list(code) if code is not None else []
        if any(getattr(entry.backend, "compiler_name", "") == "inductor" for entry in entries):
            found.append(_name(code))
    return found


def _name(code: CodeType) -> str:
    file = Path(code.co_filename)
    if file.is_relative_to(Path(torch.__file__).parent):
        # The function is most often a compiled module of torch.nn. Its code is that of a wrapper in Dynamo. The
        # wrapper's name says nothing about the module.
        return "a module of torch.nn"
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified name
    return f"{name} ({file.name}:{code.co_firstlineno})"
