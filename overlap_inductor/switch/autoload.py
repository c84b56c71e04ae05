"""Entry point of the group ``torch.backends``, called at the end of every ``import torch`` of an installed package.

An exception here would break ``import torch`` for everybody, and every microsecond is everybody's. So: read one
variable, and only if it switches something on, leave a hook for the import of ``torch._inductor.config``. What the
variables say is looked at (and complained about) by the first compile.
"""

from __future__ import annotations

import os
from collections.abc import Callable

OFF = ("", "0", "off")


def autoload() -> None:
    """Switch on what ``OVERLAP_INDUCTOR`` asks for. Never raises."""
    if os.environ.get("OVERLAP_INDUCTOR", "") not in OFF:
        _try(_wait)


def _wait() -> None:
    from overlap_inductor.inductor.import_hook import when_imported
    from overlap_inductor.torch_compat import telemetry

    telemetry.register_log_name()
    when_imported("torch._inductor.config", lambda: _try(_enable))


def _enable() -> None:
    from overlap_inductor.switch.install import enable_from_environment

    enable_from_environment()


def _try(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:  # noqa: BLE001  whatever it is, the import that we are called from has to go on
        import logging

        logging.getLogger("overlap_inductor").warning(
            "OVERLAP_INDUCTOR is set, but overlap_inductor could not be switched on and does nothing: %r", error
        )
