# SPDX-License-Identifier: Apache-2.0
"""The function that ``import torch`` calls at its end, as an entry point of the group ``torch.backends``.
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` prevents the call.

An exception here would break ``import torch`` for everybody. So the entry point only reads the variables
``OVERLAP_INDUCTOR`` and ``OVERLAP_INDUCTOR_DUMP``. If there is something to do, the entry point installs a hook that
runs when a module of Inductor is imported. For ``OVERLAP_INDUCTOR``, the entry point also registers the name of the
log. The first compile checks the variables' values.
"""

from __future__ import annotations

import os
from collections.abc import Callable

OFF = ("", "0", "off")


def autoload() -> None:
    """Switch on what ``OVERLAP_INDUCTOR`` asks for. If only ``OVERLAP_INDUCTOR_DUMP`` is set, prepare a warning. Never
    raises."""
    mode = os.environ.get("OVERLAP_INDUCTOR", "")
    if mode not in OFF:
        _try(_wait)
    elif not mode and os.environ.get("OVERLAP_INDUCTOR_DUMP"):
        _try(_watch_dump)


def _wait() -> None:
    from overlap_inductor.inductor.import_hook import when_imported
    from overlap_inductor.torch_compat import telemetry

    telemetry.register_log_name()
    when_imported("torch._inductor.config", lambda: _try(_enable))


def _watch_dump() -> None:
    from overlap_inductor.inductor.import_hook import when_imported

    when_imported("torch._inductor.compile_fx", lambda: _try(_say_at_first_compile))


def _say_at_first_compile() -> None:
    from overlap_inductor.inductor.unused_dump import say_at_first_compile

    say_at_first_compile()


def _enable() -> None:
    from overlap_inductor.switch.install import enable_from_environment

    enable_from_environment()


def _try(step: Callable[[], None]) -> None:
    try:
        step()
    except Exception as error:  # noqa: BLE001  no error may stop the import that called us
        import logging

        logging.getLogger("overlap_inductor").warning(
            "OVERLAP_INDUCTOR or OVERLAP_INDUCTOR_DUMP is set, but overlap_inductor could not be switched on, and does "
            "nothing: %r",
            error,
        )
