# SPDX-License-Identifier: Apache-2.0
"""Makes Python find the package's entry points although the package is not installed."""

from __future__ import annotations

from pathlib import Path

ENTRY_POINTS = """\
[torch.backends]
overlap_inductor = overlap_inductor.switch.autoload:autoload
[torch_dynamo_backends]
overlap_inductor = overlap_inductor.switch.backend:overlap_inductor
"""


def pretend_installed(folder: Path) -> None:
    """Write the metadata of an installed package into ``folder``. A process sees the package as installed if
    ``folder`` is on its ``PYTHONPATH``."""
    info = folder / "overlap_inductor-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: overlap-inductor\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
