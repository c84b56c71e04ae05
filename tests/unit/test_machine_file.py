# SPDX-License-Identifier: Apache-2.0
"""The switch ``machine``: the facts that it accepts and the values that it refuses. The cache key, and the text that
ranks compare, hold the facts and not the file's path."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from overlap_inductor.config import OverlapConfig
from overlap_inductor.errors import ConfigError
from overlap_inductor.facts.exchange import ExchangePlan
from overlap_inductor.facts.exchange import difference
from overlap_inductor.facts.machine import Machine
from overlap_inductor.facts.machine import machine_for
from overlap_inductor.facts.machine_file import FIELDS
from overlap_inductor.facts.machine_file import told

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "slow_ethernet.json"
BAD: list[tuple[str, str, str]] = [
    ("[1]", "no JSON object", "link_bytes, step_seconds"),
    ('"link_bytes"', "no JSON object", "link_bytes"),
    ("", "not JSON", "expected a JSON object"),
    ('{"link_bytes": }', "not JSON", "expected a JSON object"),
    ("[" * 100000, "not JSON", "expected a JSON object"),
    ('{"link_byte": 1e8}', "'link_byte'", "Did you mean link_bytes?"),
    ('{"name": "cpu"}', "'name'", "The fields are matmul_flops"),
    ('{"colour": 1}', "'colour'", "The fields are matmul_flops"),
    *(
        (f'{{"link_bytes": {value}}}', f"link_bytes = {shown}", "a number above 0")
        for value, shown in [("0", "0"), ("-1e8", "-100000000.0"), ("true", "true"), ("null", "null")]
        + [('"1e8"', '"1e8"'), ("NaN", "NaN"), ("1e999", "Infinity"), ("[1e8]", "[100000000.0]")]
    ),
    (f'{{"step_seconds": 1{"0" * 400}}}', "step_seconds = 1000", "a number above 0"),
    ('{"least_tiles": 1.5}', "least_tiles = 1.5", "a whole number of at least 1"),
    ('{"least_tiles": 0}', "least_tiles = 0", "a whole number of at least 1"),
    ('{"least_tiles": true}', "least_tiles = true", "a whole number of at least 1"),
    ('{"overlapped_efficiency": 1.01}', "overlapped_efficiency = 1.01", "above 0 and at most 1"),
    ('{"overlapped_efficiency": 0}', "overlapped_efficiency = 0", "above 0 and at most 1"),
    ('{"matmul_flops": 5e10}', "matmul_flops = 50000000000.0", "by bytes of an element"),
    ('{"matmul_flops": {}}', "matmul_flops = {}", "by bytes of an element"),
    ('{"matmul_flops": {"3": 5e10}}', 'matmul_flops = {"3"', "by bytes of an element"),
    ('{"matmul_flops": {"4": 0}}', "matmul_flops['4'] = 0", "a number above 0"),
]


def write(path: Path, facts: Any) -> str:
    path.write_text(json.dumps(facts))
    return str(path)


@pytest.mark.parametrize(("text", "field", "allowed"), BAD, ids=lambda value: str(value)[:30])
def test_a_bad_file_is_an_error_that_names_file_field_and_allowed_values(
    tmp_path: Path, text: str, field: str, allowed: str
) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        OverlapConfig.from_environment({"OVERLAP_INDUCTOR_MACHINE": str(path)})
    message = str(error.value)
    assert message.startswith(f"OVERLAP_INDUCTOR_MACHINE={str(path)!r} ")
    assert field in message and allowed in message


@pytest.mark.parametrize(("name", "why"), [("none.json", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_the_same_error(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"OVERLAP_INDUCTOR_MACHINE=.*{why}.*expected a file that holds"):
        OverlapConfig(machine=str(tmp_path / name))


def test_a_file_of_bytes_that_are_no_text_is_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(ConfigError, match="OVERLAP_INDUCTOR_MACHINE=.*cannot be read"):
        OverlapConfig(machine=str(tmp_path / "machine.json"))


def test_every_fact_can_be_set() -> None:
    """Catches a field of ``Machine`` that the file cannot set, and a field that is set but not used."""
    shipped = machine_for("cpu")
    assert {f.name for f in dataclasses.fields(Machine)} == {*FIELDS, "name"}
    facts = {name: 3 if name == "least_tiles" else 0.5 for name in FIELDS if name != "matmul_flops"}
    facts_of_rates = {**facts, "matmul_flops": {"4": 7.0}}
    config = OverlapConfig(machine=json.dumps(facts_of_rates))
    machine = told(shipped, config.machine)
    assert machine == Machine("cpu", {**shipped.matmul_flops, 4: 7.0}, **facts)  # type: ignore[arg-type]
    assert told(shipped, None) is shipped and shipped.matmul_flops[4] != 7.0


def test_the_key_has_the_facts_and_not_the_path(tmp_path: Path) -> None:
    """If the key held the path, a moved file would cause a new compile. If the key held only the path, a changed file
    would get cached code for the old facts."""
    one = OverlapConfig(machine=write(tmp_path / "a.json", {"link_bytes": 62500000, "step_seconds": 1e-4}))
    same = OverlapConfig(machine=write(tmp_path / "b.json", {"step_seconds": 0.0001, "link_bytes": 6.25e7}))
    other = OverlapConfig(machine=write(tmp_path / "a.json", {"link_bytes": 62500001, "step_seconds": 1e-4}))
    assert one.cache_key() == same.cache_key() == OverlapConfig(machine=one.machine).cache_key()
    assert len({config.cache_key() for config in (one, other, OverlapConfig())}) == 3
    assert dataclasses.replace(one, sub_chunks=2).machine == one.machine
    assert OverlapConfig(machine="").machine is None
    assert OverlapConfig(machine=tmp_path / "b.json").machine == one.machine  # type: ignore[arg-type]


def test_a_difference_between_ranks_names_the_facts() -> None:
    mine, theirs = (
        ExchangePlan("1", "on", (step,), True, dict(OverlapConfig(machine=facts).cache_key()))
        for step, facts in (("g0: ring", '{"link_bytes": 6.25e7}'), ("g0: kept", None))
    )
    text = difference(mine, {1: ExchangePlan.from_json(theirs.to_json())})
    assert "machine is '{\"link_bytes\": 62500000.0}' here and None there" in text


def test_the_example_file_is_allowed() -> None:
    assert json.loads(OverlapConfig(machine=str(EXAMPLE)).machine or "") == json.loads(EXAMPLE.read_text())
