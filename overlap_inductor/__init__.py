# SPDX-License-Identifier: Apache-2.0
"""overlap_inductor: a ``torch.compile`` pass that hides tensor-parallel collectives behind their matmuls.

Importing this package imports none of ``torch._inductor``, ``torch._dynamo`` and ``triton``. Every public name but
``__version__`` is resolved on first use (PEP 562), because ``import torch`` itself may import the package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING
from typing import Any

from overlap_inductor.version import __version__ as __version__

_PUBLIC = {
    "OverlapConfig": "overlap_inductor.config",
    "enable": "overlap_inductor.switch.install",
    "disable": "overlap_inductor.switch.install",
    "overlap": "overlap_inductor.switch.install",
    "explain": "overlap_inductor.switch.explain",
    "last_report": "overlap_inductor.report.publish",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from overlap_inductor.config import OverlapConfig as OverlapConfig
    from overlap_inductor.report.publish import last_report as last_report
    from overlap_inductor.switch.explain import explain as explain
    from overlap_inductor.switch.install import disable as disable
    from overlap_inductor.switch.install import enable as enable
    from overlap_inductor.switch.install import overlap as overlap


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'overlap_inductor' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
