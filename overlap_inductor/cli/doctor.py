# SPDX-License-Identifier: Apache-2.0
"""``overlap-inductor doctor``: check the machine and the switches, and say why something cannot run or has no
effect."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

from overlap_inductor.cli import doctor_machine
from overlap_inductor.cli.doctor_checks import BAD
from overlap_inductor.cli.doctor_checks import GOOD
from overlap_inductor.cli.doctor_checks import NOTE
from overlap_inductor.cli.doctor_checks import Check
from overlap_inductor.cli.doctor_checks import as_dict
from overlap_inductor.cli.doctor_checks import as_text
from overlap_inductor.cli.doctor_checks import usable
from overlap_inductor.cli.doctor_facts import machine_facts
from overlap_inductor.cli.doctor_registered import registered
from overlap_inductor.cli.doctor_registered import why_not_here
from overlap_inductor.config import ENVIRONMENT_PREFIX
from overlap_inductor.config import OverlapConfig
from overlap_inductor.config import why_unknown
from overlap_inductor.errors import ConfigError

ENTRY_POINTS = {
    "torch_dynamo_backends": 'torch.compile(backend="overlap_inductor")',
    "torch.backends": "OVERLAP_INDUCTOR=1",
}
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
SWITCHES = "Switched on"
_INSTALL = "Install the package (pip install, not only a path on PYTHONPATH), so that torch finds its entry points."


def run_doctor(as_json: bool = False) -> int:
    """Print the checks, as JSON with ``as_json``. Returns 0 if everything that is required or requested can take
    effect, else 1."""
    checks = collect()
    print(json.dumps(as_dict(checks), indent=1) if as_json else as_text(checks), end="\n" if as_json else "")
    return 0 if usable(checks) else 1


def collect() -> list[Check]:
    """All checks, in the order in which they are shown. If torch is missing or not supported, only the checks of the
    software."""
    checks = doctor_machine.software()
    if any(check.name == "torch" and check.state == BAD for check in checks):
        return checks
    machine = [*doctor_machine.distributed(), *doctor_machine.gpus()]
    return [*checks, *machine, *registered(), *machine_facts(), *switches()]


def switches() -> list[Check]:
    """Checks of the environment's switches, and of their effect in this process on ``torch.compile`` without a
    ``backend`` argument."""
    checks = [*_entry_points(), *_variables()]
    try:
        config = OverlapConfig.from_environment()
    except ConfigError as error:
        if any(check.state == BAD for check in checks if check.name.startswith(ENVIRONMENT_PREFIX)):
            return checks
        return [*checks, Check(SWITCHES, "configuration", BAD, "not valid", f"{str(error).rstrip('.')}.")]
    # If OVERLAP_INDUCTOR is not set, ``config.mode`` is only the default of enable().
    asked = ENVIRONMENT_PREFIX in os.environ and config.mode != "off"
    if asked:
        checks += [_effective(config), *_differences(config), *_schedule(config)]
    else:
        checks.append(Check(SWITCHES, "by environment", NOTE, "OVERLAP_INDUCTOR is not set, or off"))
    if config.dump is not None:
        checks.append(_dump_folder(config.dump))
    return [*checks, *_inductor(asked)]


def _entry_points() -> list[Check]:
    checks = []
    for group, use in ENTRY_POINTS.items():
        found = _registered(group)
        value = f"registered, for {use}" if found else f"not registered: {use} does not work"
        checks.append(
            Check(SWITCHES, f"entry point {group}", GOOD if found else NOTE, value, "" if found else _INSTALL)
        )
    return checks


def _registered(group: str) -> bool:
    return any(point.value.startswith("overlap_inductor") for point in entry_points(group=group))


def _variables() -> list[Check]:
    names = sorted(name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX))
    checks = []
    for name in names:
        if reason := why_unknown(name):
            advice = f"This is {reason} While it is set, a compile with overlap raises ConfigError."
            checks.append(Check(SWITCHES, name, BAD, os.environ[name], advice))
        else:
            checks.append(Check(SWITCHES, name, GOOD, os.environ[name]))
    return checks


def _effective(config: OverlapConfig) -> Check:
    """Whether the pass is in Inductor's slot (its setting for custom passes) in this process. This process loads the
    pass as a user's process does."""
    from overlap_inductor.inductor import probe

    name = "by environment"
    if (effective := probe.config_in_slot()) is not None:
        value = f"requested {config.mode}, effective {effective.mode}: the pass is in Inductor's slot"
        return Check(SWITCHES, name, GOOD if effective.mode == config.mode else BAD, value)
    value = f"requested {config.mode}, effective off"
    if os.environ.get(AUTOLOAD, "1") != "1":
        advice = (
            f"{AUTOLOAD}={os.environ[AUTOLOAD]} keeps torch from loading overlap_inductor. Unset that variable, or call"
            " overlap_inductor.enable()."
        )
        return Check(SWITCHES, name, BAD, value, advice)
    if not _registered("torch.backends"):
        return Check(SWITCHES, name, BAD, value, f"The entry point torch.backends is not registered. {_INSTALL}")
    advice = (
        f"The slot holds {probe.slot_content()}. Other code replaced or wrapped the pass, or switched it off. Call"
        " overlap_inductor.enable() after that code has run."
    )
    return Check(SWITCHES, name, BAD, value, advice)


def _differences(requested: OverlapConfig) -> list[Check]:
    """A check for each switch whose effective value differs from the value in the environment."""
    from overlap_inductor.inductor import probe

    effective = probe.config_in_slot()
    if effective is None:
        return []
    checks = []
    for field in dataclasses.fields(OverlapConfig):
        wanted, got = getattr(requested, field.name), getattr(effective, field.name)
        if wanted != got:
            advice = "This process called enable() with another value. Remove the call, or set the variable to match."
            checks.append(Check(SWITCHES, field.name, BAD, f"requested {wanted}, effective {got}", advice))
    return checks


def _schedule(config: OverlapConfig) -> list[Check]:
    """A list with one check, of state ``bad``, if the schedule that the environment names cannot run here. Otherwise an
    empty list."""
    from overlap_inductor.lowerings.registry import SCHEDULES

    name = f"{ENVIRONMENT_PREFIX}_SCHEDULE={config.schedule}"
    reasons = [why_not_here(schedule) for schedule in SCHEDULES if schedule.name == config.schedule]
    advice = f"Every site would be refused here. Unset {ENVIRONMENT_PREFIX}_SCHEDULE, or set it to auto."
    return [Check(SWITCHES, name, BAD, f"cannot run here: {reason}", advice) for reason in reasons if reason]


def _dump_folder(folder: str) -> Check:
    place = Path(folder).absolute()
    existing = next(path for path in (place, *place.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return Check(SWITCHES, "dump folder", GOOD, folder)
    except OSError as error:
        advice = f"{existing} cannot be written ({error.strerror}): name another folder in {ENVIRONMENT_PREFIX}_DUMP."
        return Check(SWITCHES, "dump folder", BAD, folder, advice)


def _inductor(asked: bool) -> list[Check]:
    from overlap_inductor.inductor import probe

    checks = [Check(SWITCHES, "Inductor's pass slot", NOTE, probe.slot_content())]
    for setting, advice in probe.hindrances():
        # Async TP takes only some of the sites. Each of the other settings leaves no site for the pass.
        blocks = asked and "micro_pipeline" not in setting
        checks.append(Check(SWITCHES, setting, BAD if blocks else NOTE, "on", advice))
    return checks
