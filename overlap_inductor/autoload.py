"""Entry point of the group ``torch.backends``, called at the end of every ``import torch`` of an installed package.

An exception here would break ``import torch`` for everybody, and every microsecond is everybody's. So: read one
variable, and only if it switches something on, leave a hook for the import of ``torch._inductor.config``. What the
variables say is looked at (and complained about) by the first compile.
"""

from __future__ import annotations

import os

OFF = ("", "0", "off")


def autoload() -> None:
    """Switch on what ``OVERLAP_INDUCTOR`` asks for. Never raises."""
    if os.environ.get("OVERLAP_INDUCTOR", "") in OFF:
        return
    try:
        from overlap_inductor.install import enable_from_environment

        enable_from_environment()
    except Exception as error:  # noqa: BLE001  whatever it is, import torch has to go on
        import logging

        logging.getLogger("overlap_inductor").warning(
            "OVERLAP_INDUCTOR is set, but overlap_inductor could not be switched on and does nothing: %r", error
        )
