# SPDX-License-Identifier: Apache-2.0
"""``import torch`` with the package installed: it costs little, never fails, and switches on overlap on request.

Each test runs programs, mostly in a fork of a process that has imported torch. The fixture ``installed`` makes a folder
with the metadata of an installed package, so that programs find its two entry points.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_base import ForkBase
from tests.support.installed import pretend_installed

ROOT = Path(__file__).parents[2]
HEAVY = ("torch._inductor", "torch._dynamo", "triton")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    pretend_installed(folder)
    return folder


def run(base: ForkBase | None, code: str, *path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fork of ``base``, or in a new interpreter."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OVERLAP_INDUCTOR", "TORCH_LOGS"))}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, [*path, ROOT]))
    environment.update(variables)
    if base:
        return base.run("-c", code, env=environment)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


def value(base: ForkBase | None, code: str, *path: Path, **variables: str) -> Any:
    done = run(base, code, *path, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# The CPU time of the first call of ``autoload``, with its imports. ``import torch`` must not have called it before.
COST = """
import torch, time, json
start = time.process_time()
from overlap_inductor.switch.autoload import autoload
autoload()
print(json.dumps(dict(seconds=time.process_time() - start)))
"""

IMPORT = f"""
import os, sys, json
import torch
names = sorted(m for m in sys.modules if m.startswith({HEAVY!r}))
"""
AFTER_IMPORT = f"""{IMPORT}
log = None
if "TORCH_LOGS" in os.environ:
    import logging
    from torch._logging._internal import log_registry
    level = logging.getLogger("overlap_inductor").level
    log = dict(known=log_registry.is_log("overlap_inductor"), level=level)
found = [f for f in sys.meta_path if type(f).__module__.startswith("overlap_inductor")]
import torch._inductor.config as config
slot = config.post_grad_custom_post_pass
left = [f for f in sys.meta_path if type(f).__module__.startswith("overlap_inductor")]
print(json.dumps(dict(found=[f.name for f in found], left=[f.name for f in left], names=names,
    slot=type(slot).__name__, log=log)))
"""
WITHOUT = f"""{IMPORT}
ours = [m for m in [*(type(f).__module__ for f in sys.meta_path), *sys.modules] if m.startswith("overlap_inductor")]
print(json.dumps(dict(names=names, ours=ours)))
"""


@pytest.mark.parametrize(
    "variables", [{}, pytest.param({"OVERLAP_INDUCTOR": "0"}, marks=pytest.mark.thorough), {"OVERLAP_INDUCTOR": "off"}]
)
def test_switched_off_it_does_nothing(dynamo_base: ForkBase, installed: Path, variables: dict[str, str]) -> None:
    got = value(dynamo_base, AFTER_IMPORT, installed, **variables)
    assert got["found"] == [] and got["slot"] == "NoneType"


def test_switched_on_it_waits_for_the_config_module_and_its_log_is_known(installed: Path) -> None:
    """The *slot* is Inductor's setting ``post_grad_custom_post_pass``. The pass is in the slot as soon as Inductor's
    config module exists. ``autoload`` imports no heavy module.

    From torch 2.13 on, ``autoload`` registers the log's name before torch reads TORCH_LOGS. An older torch reads
    TORCH_LOGS before it calls ``autoload``. If TORCH_LOGS has the name, an older torch imports all sub-packages of
    this package. The programs run in new interpreters, because a fork cannot show what ``import torch`` imports.
    """
    got = value(None, AFTER_IMPORT, installed, OVERLAP_INDUCTOR="1", TORCH_LOGS="+overlap_inductor")
    assert got["found"] == ["torch._inductor.config"]
    assert got["left"] == ["torch._inductor.compile_fx"]
    assert got["slot"] == "OverlapPass"
    assert got["log"] == {"known": True, "level": 10}
    without = value(None, WITHOUT, installed, OVERLAP_INDUCTOR="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert not without["ours"], "PyTorch's own switch must turn autoload off"
    assert got["names"] == without["names"], "autoload must not import a heavy module"


@pytest.mark.parametrize(("switch", "bound"), [("0", 0.005), ("1", 0.05)])
def test_its_cost(torch_base: ForkBase, switch: str, bound: float) -> None:
    """Importing Inductor takes about two seconds, so ``autoload`` must not import it."""
    variables = {"OVERLAP_INDUCTOR": switch, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    value(torch_base, COST, **variables)  # compiles the byte code, if there is none
    assert value(torch_base, COST, **variables)["seconds"] < bound


COMPILE = """
import torch
print("imported", flush=True)
torch.compile(lambda x: x @ x)(torch.ones(2, 2))
"""


@pytest.mark.parametrize("variable", ["OVERLAP_INDUCTOR", "OVERLAP_INDUCTOR_SCHEDULE"])
def test_a_bad_value_is_an_error_of_the_first_compile(
    inductor_base: ForkBase, installed: Path, variable: str, tmp_path: Path
) -> None:
    """``import torch`` must not raise the error, because programs that never compile must keep running."""
    variables = {"OVERLAP_INDUCTOR": "1", variable: "banana", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = run(inductor_base, COMPILE, installed, **variables)
    assert "imported" in done.stdout
    assert done.returncode != 0
    assert f"ConfigError: {variable}='banana' is not a known value; expected one of" in done.stderr


@pytest.mark.parametrize("mode", ["1", "off"])
def test_an_unknown_variable_is_an_error_of_the_first_compile(
    inductor_base: ForkBase, installed: Path, mode: str, tmp_path: Path
) -> None:
    """An unknown variable is an error only if overlap is switched on."""
    variables = {"OVERLAP_INDUCTOR": mode, "OVERLAP_INDUCTOR_SHEDULE": "ring", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = run(inductor_base, COMPILE, installed, **variables)
    assert "imported" in done.stdout
    assert (done.returncode != 0) == (mode == "1"), done.stderr
    named = "ConfigError: OVERLAP_INDUCTOR_SHEDULE='ring' is not a switch of overlap_inductor. Did you mean"
    assert (f"{named} OVERLAP_INDUCTOR_SCHEDULE?" in done.stderr) == (done.returncode != 0)


UNUSED = "OVERLAP_INDUCTOR_DUMP is set, but overlap_inductor is not switched on"
TWICE = COMPILE + "torch.compile(lambda x: x @ x @ x)(torch.ones(2, 2))\n"


@pytest.mark.parametrize(
    ("base", "first", "variables", "said"),
    [
        ("dynamo", "", {}, 1),
        ("inductor", "", {"OVERLAP_INDUCTOR": "off"}, 0),
        ("inductor", "", {"RANK": "1"}, 0),
        ("inductor", "import torch._inductor.compile_fx, overlap_inductor; overlap_inductor.enable()", {}, 0),
    ],
    ids=["alone", "switched off", "another rank", "enable"],
)
def test_a_dump_folder_without_overlap_is_a_warning_at_the_first_compile(
    dynamo_base: ForkBase,
    inductor_base: ForkBase,
    installed: Path,
    base: str,
    first: str,
    variables: dict[str, str],
    said: int,
    tmp_path: Path,
) -> None:
    """The warning appears once, on rank 0. It does not appear if the environment switches overlap off or the program
    switches it on."""
    folders = {"OVERLAP_INDUCTOR_DUMP": str(tmp_path / "dump"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = run(
        {"dynamo": dynamo_base, "inductor": inductor_base}[base], f"{first}\n{TWICE}", installed, **folders, **variables
    )
    assert done.returncode == 0 and done.stderr.count(UNUSED) == said, done.stderr


def test_a_dump_folder_does_not_import_compile_fx(dynamo_base: ForkBase, installed: Path) -> None:
    got = value(dynamo_base, AFTER_IMPORT, installed, OVERLAP_INDUCTOR_DUMP="x")
    assert got["found"] == ["torch._inductor.compile_fx"] and got["slot"] == "NoneType"
    assert "torch._inductor.compile_fx" not in got["names"]


def test_disable_before_inductor_is_imported(dynamo_base: ForkBase, installed: Path) -> None:
    code = (
        "import json, torch, overlap_inductor; overlap_inductor.disable()\n"
        "import torch._inductor.config as c; print(json.dumps(dict(slot=c.post_grad_custom_post_pass)))"
    )
    assert value(dynamo_base, code, installed, OVERLAP_INDUCTOR="1") == {"slot": None}


def test_an_unknown_torch_is_reported_and_left_alone(dynamo_base: ForkBase, installed: Path) -> None:
    code = (
        "import overlap_inductor.torch_compat.versions as v; v.FIRST_UNKNOWN = (2, 3); v.OLDEST = (2, 2)\n"
        "import torch, torch._inductor.config as c, overlap_inductor\n"
        "assert c.post_grad_custom_post_pass is None\n"
        "try:\n    overlap_inductor.enable()\n"
        "except Exception as e:\n    print(type(e).__name__, e)\n"
    )
    done = run(dynamo_base, code, installed, OVERLAP_INDUCTOR="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("overlap_inductor supports torch 2.2 to 2.2") == 1
    assert done.stdout.startswith("UnsupportedError overlap_inductor supports torch 2.2 to 2.2 and this is torch")


def test_a_failure_of_autoload_does_not_fail_import_torch(torch_base: ForkBase, installed: Path) -> None:
    code = (
        "import overlap_inductor.inductor.import_hook as i\n"
        "def broken(*args): raise RuntimeError('made up')\n"
        "i.when_imported = broken\n"
        "import torch; print('fine')\n"
    )
    done = run(torch_base, code, installed, OVERLAP_INDUCTOR="1")
    assert done.stdout == "fine\n", done.stderr
    assert "could not be switched on" in done.stderr and "made up" in done.stderr


def test_importing_the_package_is_light(torch_base: ForkBase) -> None:
    """``import torch`` imports ``autoload``. With TORCH_LOGS, it may also import the sub-packages. None of these may
    import a heavy module."""
    code = f"""
import sys, json, torch
before = set(sys.modules)
import overlap_inductor, overlap_inductor.switch.autoload
import overlap_inductor.passes, overlap_inductor.lowerings, overlap_inductor.transports, overlap_inductor.torch_compat
overlap_inductor.OverlapConfig, overlap_inductor.enable, overlap_inductor.last_report, overlap_inductor.explain
overlap_inductor.enable(); overlap_inductor.disable()
print(json.dumps(dict(new=sorted(m for m in set(sys.modules) - before if m.startswith({HEAVY!r})))))
"""
    assert value(torch_base, code)["new"] == []


@pytest.mark.parametrize(
    "first",
    [
        "overlap_inductor.inductor.pass_slot",
        pytest.param("overlap_inductor.inductor.probe", marks=pytest.mark.thorough),
        pytest.param("overlap_inductor.switch.install", marks=pytest.mark.thorough),
        "torch._inductor.config",
    ],
)
def test_the_pass_is_in_the_slot_whichever_module_is_imported_first(
    dynamo_base: ForkBase, installed: Path, first: str
) -> None:
    """The first module may be one of ours. It may import Inductor's configuration before the rest of its body has
    run."""
    code = (
        f"import torch, importlib; importlib.import_module({first!r})\nfrom overlap_inductor.inductor import"
        " probe\nprint(int(probe.config_in_slot() is not None))"
    )
    done = run(dynamo_base, code, installed, OVERLAP_INDUCTOR="1")
    assert done.returncode == 0 and done.stdout.split() == ["1"] and "could not be switched on" not in done.stderr, (
        done.stderr
    )


def test_the_doctor_finds_the_pass_if_the_environment_asks_for_it(dynamo_base: ForkBase, installed: Path) -> None:
    done = run(
        dynamo_base,
        "import sys, torch; from overlap_inductor.cli.main import main; main(['doctor', '--json'])",
        installed,
        OVERLAP_INDUCTOR="1",
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["by environment"]["value"] == "requested on, effective on: the pass is in Inductor's slot", checks[
        "by environment"
    ]


def test_after_an_early_enable_the_pass_is_in_the_slot_once_our_own_module_is_imported(dynamo_base: ForkBase) -> None:
    code = (
        "import torch, overlap_inductor; overlap_inductor.enable(); import overlap_inductor.inductor.pass_slot\nfrom"
        " overlap_inductor.inductor import probe\nprint(int(probe.config_in_slot() is not None))"
    )
    done = run(dynamo_base, code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0 and done.stdout.split() == ["1"], done.stderr
