# SPDX-License-Identifier: Apache-2.0
"""The switches accept certain values. Any other value raises an error that names the variable, the value, and what is
allowed."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from overlap_inductor.config import MODES
from overlap_inductor.config import NUMERICS
from overlap_inductor.config import OverlapConfig
from overlap_inductor.config import variables
from overlap_inductor.errors import ConfigError
from overlap_inductor.facts import names
from tests.support.fork_base import ForkBase

SCHEDULES = ("auto", "keep", "ring", "chunked", "fused", "wave_groups", "small_message", "early_start")
TRANSPORTS = ("auto", "p2p", "copy_engine", "sm_push", "nccl")
PATTERNS = (
    "all_gather_matmul",
    "all_gather_attention",
    "attention_all_gather",
    "attention_all_to_all",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_all_gather",
    "embedding_all_to_all",
    "all_to_all_experts",
    "matmul_all_to_all",
    "all_to_all_matmul",
)
BAD = [
    ("OVERLAP_INDUCTOR", "yes", MODES),
    ("OVERLAP_INDUCTOR", "ON", MODES),
    ("OVERLAP_INDUCTOR", "2", MODES),
    ("OVERLAP_INDUCTOR_SCHEDULE", "rings", SCHEDULES),
    ("OVERLAP_INDUCTOR_SCHEDULE", "", SCHEDULES),
    ("OVERLAP_INDUCTOR_TRANSPORT", "pigeon", TRANSPORTS),
    ("OVERLAP_INDUCTOR_PATTERNS", "all_gather_matmul,nothing", PATTERNS),
    ("OVERLAP_INDUCTOR_NUMERICS", "fast", NUMERICS),
    ("OVERLAP_INDUCTOR_TUNE", "maybe", ("off", "on")),
    ("OVERLAP_INDUCTOR_TUNE", "on", ("off",)),
    ("OVERLAP_INDUCTOR_REPLAY", "0", ("off", "on")),
    ("OVERLAP_INDUCTOR_NOTICE", "1", ("off", "on")),
    ("OVERLAP_INDUCTOR_RING_DIRECTION", "left", ("unidirectional", "bidirectional")),
    ("OVERLAP_INDUCTOR_SUB_CHUNKS", "0", ("at least 1",)),
    ("OVERLAP_INDUCTOR_SUB_CHUNKS", "-4", ("at least 1",)),
    ("OVERLAP_INDUCTOR_SUB_CHUNKS", "four", ("at least 1",)),
    ("OVERLAP_INDUCTOR_SUB_CHUNKS", "1.5", ("whole number",)),
    ("OVERLAP_INDUCTOR_STEP_NODE_BUDGET", "0", ("at least 1",)),
    ("OVERLAP_INDUCTOR_AGREEMENT_TIMEOUT", "", ("at least 1",)),
    ("OVERLAP_INDUCTOR_MACHINE", "no/such/file.json", ("a file that holds a JSON object",)),
]


@pytest.mark.parametrize(("variable", "value", "allowed"), BAD)
def test_bad_variable_is_an_error_that_names_it(variable: str, value: str, allowed: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        OverlapConfig.from_environment({variable: value})
    message = str(error.value)
    assert f"{variable}=" in message
    assert value.split(",")[-1] in message
    assert all(name in message for name in allowed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", True),
        ("schedule", None),
        ("patterns", 5),
        ("patterns", ("all_gather_matmul", 5)),
        ("dump", 5),
        ("machine", 5),
    ]
    + [("sub_chunks", None), ("sub_chunks", [4]), ("numerics", ["preserve"])],
)
def test_bad_keyword_is_the_same_error(field: str, value: object) -> None:
    """A value of a wrong type must not raise a TypeError."""
    with pytest.raises(ConfigError, match="OVERLAP_INDUCTOR"):
        OverlapConfig.from_environment({}, **{field: value})


def test_a_keyword_that_is_no_switch_is_an_error_with_the_switches() -> None:
    with pytest.raises(ConfigError, match="sched: no such switch.*schedule"):
        OverlapConfig.from_environment({}, sched="ring")


@pytest.mark.parametrize(("value", "mode"), [("0", "off"), ("", "off"), ("1", "on"), ("strict", "strict")])
def test_mode_aliases(value: str, mode: str) -> None:
    assert OverlapConfig.from_environment({"OVERLAP_INDUCTOR": value}).mode == mode


def test_every_field_is_read_from_its_variable() -> None:
    """Each field must have a variable. Only ``tune`` keeps its default here, because it has no other allowed value."""
    environment = {
        "OVERLAP_INDUCTOR": "report",
        "OVERLAP_INDUCTOR_SCHEDULE": "ring",
        "OVERLAP_INDUCTOR_TRANSPORT": "p2p",
        "OVERLAP_INDUCTOR_PATTERNS": "all_gather_matmul, matmul_all_reduce",
        "OVERLAP_INDUCTOR_NUMERICS": "allow_hop_rounding",
        "OVERLAP_INDUCTOR_SEQUENCE_PARALLEL": "on",
        "OVERLAP_INDUCTOR_TUNE": "off",
        "OVERLAP_INDUCTOR_RING_DIRECTION": "bidirectional",
        "OVERLAP_INDUCTOR_SUB_CHUNKS": "2",
        "OVERLAP_INDUCTOR_STEP_NODE_BUDGET": "17",
        "OVERLAP_INDUCTOR_WORKSPACE_LIMIT": "64",
        "OVERLAP_INDUCTOR_MAX_TOKENS": "4096",
        "OVERLAP_INDUCTOR_REPLAY": "off",
        "OVERLAP_INDUCTOR_AGREEMENT_TIMEOUT": "9",
        "OVERLAP_INDUCTOR_MACHINE": '{"link_bytes": 1e8}',
        "OVERLAP_INDUCTOR_DUMP": "some/folder",
        "OVERLAP_INDUCTOR_NOTICE": "off",
    }
    assert set(environment) == set(variables())
    config = OverlapConfig.from_environment(environment)
    assert config.patterns == ("all_gather_matmul", "matmul_all_reduce")
    default = OverlapConfig()
    same = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) == getattr(default, f.name)]
    assert same == ["tune"]


def test_keywords_win_over_variables() -> None:
    config = OverlapConfig.from_environment({"OVERLAP_INDUCTOR_SUB_CHUNKS": "2"}, sub_chunks=8)
    assert config.sub_chunks == 8


def test_other_variables_are_not_read() -> None:
    assert OverlapConfig.from_environment({"OVERLAP": "strict", "SCHEDULE": "ring"}) == OverlapConfig()


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("OVERLAP_INDUCTOR_SHEDULE", "Did you mean OVERLAP_INDUCTOR_SCHEDULE? "),
        ("OVERLAP_INDUCTOR_MODE", "Did you mean OVERLAP_INDUCTOR? "),
        ("OVERLAP_INDUCTOR_DUMP_DIR", "Did you mean OVERLAP_INDUCTOR_DUMP? "),
        ("OVERLAP_INDUCTOR_schedule", "Did you mean OVERLAP_INDUCTOR_SCHEDULE? "),
        ("OVERLAP_INDUCTOR_XYZ", "is not a switch of overlap_inductor. The switches are "),
    ],
)
def test_an_unknown_variable_is_an_error_that_names_the_nearest_switch(variable: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        OverlapConfig.from_environment({variable: "ring", "OVERLAP_INDUCTOR": "1"})
    message = str(error.value)
    assert message.startswith(f"{variable}='ring' is not a switch") and meant in message
    assert all(name in message for name in variables()) == ("Did you mean" not in message)


def test_an_unknown_variable_is_allowed_if_overlap_is_off_or_its_prefix_is_another() -> None:
    environment = {"OVERLAP_INDUCTOR_SHEDULE": "ring", "OVERLAP_INDUCTOR": "off"}
    assert OverlapConfig.from_environment(environment).mode == "off"
    assert OverlapConfig.from_environment({"OVERLAP_INDUCTORS": "2"}).mode == "on"


def test_cache_key_has_every_field_that_changes_code() -> None:
    """If a switch that changes the code is missing from the key, a cache returns wrong code. Any other switch in the
    key causes useless compiles."""
    config = OverlapConfig()
    fields = {f.name for f in dataclasses.fields(config)}
    assert {name for name, _ in config.cache_key()} == fields - {"dump", "notice"}
    assert dataclasses.replace(config, dump="x", notice="off").cache_key() == config.cache_key()
    assert dataclasses.replace(config, sub_chunks=5).cache_key() != config.cache_key()


def test_dump_takes_a_path() -> None:
    assert OverlapConfig(dump=Path("a") / "b").dump == str(Path("a") / "b")  # type: ignore[arg-type]
    assert OverlapConfig(dump="").dump is None


@pytest.mark.parametrize(
    ("variable", "kind"), [("SCHEDULE", names.SCHEDULES), ("TRANSPORT", names.TRANSPORTS), ("PATTERNS", names.PATTERNS)]
)
def test_a_name_that_is_added_is_accepted_until_it_is_removed(variable: str, kind: names.Names) -> None:
    environment = {f"OVERLAP_INDUCTOR_{variable}": "pigeon"}
    kind.add("pigeon")
    try:
        OverlapConfig.from_environment(environment)
        with pytest.raises(ValueError, match="'pigeon' cannot be the name of a"):
            kind.add("pigeon")
    finally:
        kind.remove("pigeon")
    with pytest.raises(ConfigError, match="pigeon"):
        OverlapConfig.from_environment(environment)


def test_a_switch_is_validated_before_anything_else_is_imported(torch_base: ForkBase) -> None:
    """A process that has imported only the configuration must know the names of schedules and transports."""
    code = (
        "from overlap_inductor.config import OverlapConfig\n"
        "config = OverlapConfig.from_environment()\n"
        "print(config.schedule, config.transport)\n"
    )
    environment = {**os.environ, "OVERLAP_INDUCTOR_SCHEDULE": "chunked", "OVERLAP_INDUCTOR_TRANSPORT": "sm_push"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = torch_base.run("-c", code, env=environment)
    assert done.stdout == "chunked sm_push\n", done.stderr
