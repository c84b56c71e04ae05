# SPDX-License-Identifier: Apache-2.0
"""A transport from outside the package needs only to be registered. Then the switch ``transport`` accepts its name,
plans use it, the doctor shows it, and the bench offers it."""

from __future__ import annotations

from typing import Any

import pytest

from bench.providers import provider_names
from overlap_inductor.cli.doctor import collect
from overlap_inductor.config import OverlapConfig
from overlap_inductor.errors import ConfigError
from overlap_inductor.errors import UnsupportedError
from overlap_inductor.inductor.fingerprint import fingerprint
from overlap_inductor.lowerings.chunked import parameters as chunked_plan
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.fused import parameters as fused_plan
from overlap_inductor.transports import registry
from overlap_inductor.transports.transport import Exchanges
from overlap_inductor.transports.transport import PeerCopies
from overlap_inductor.transports.transport import WholeCollectives
from tests.support import toy_transports as toy

MIB = 1 << 20


def _fitted(mib: int, **settings: Any) -> str:
    """The transport that is chosen for a gather of shards of ``mib`` MiB."""
    p = ChunkedParameters(132, **settings)
    return chunked_plan.fitted("all_gather_matmul", 8, mib * MIB // 2048, 1024, 1024, 2, 2, p).transport


def test_each_transport_of_the_package_implements_one_protocol() -> None:
    kinds = {p.__name__: registry.names_of(p) for p in (PeerCopies, Exchanges, WholeCollectives)}
    assert kinds == {
        "PeerCopies": ("copy_engine", "sm_push"),
        "Exchanges": ("p2p",),
        "WholeCollectives": ("nccl",),
    }


@pytest.mark.parametrize(
    ("transport", "providers"),
    [
        (toy.Courier(), ["chunked/courier", "fused/courier"]),
        (toy.Pigeons(), ["ring/pigeons"]),
        (toy.Choir(), ["wave_groups/choir"]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_one_call_offers_it_everywhere(transport: Any, providers: list[str]) -> None:
    before = provider_names()
    key = fingerprint(OverlapConfig())
    with toy.registered(transport):
        assert OverlapConfig(transport=transport.name).transport == transport.name
        assert sorted(set(provider_names()) - set(before)) == providers
        shown = {(check.section, check.name): check.value for check in collect()}
        assert transport.moved_by in shown["Transports", transport.name]
        assert all(provider.split("/")[0] in shown["Transports", transport.name] for provider in providers)
        assert fingerprint(OverlapConfig()) != key
    assert provider_names() == before and fingerprint(OverlapConfig()) == key
    with pytest.raises(ConfigError, match=f"OVERLAP_INDUCTOR_TRANSPORT='{transport.name}'"):
        OverlapConfig(transport=transport.name)


def test_it_is_chosen_by_size_only_if_it_sets_fastest_from() -> None:
    by_size = {1: "sm_push", 2: "copy_engine", 64: "copy_engine"}
    assert {mib: _fitted(mib) for mib in by_size} == by_size
    with toy.registered(toy.Courier()):
        assert {mib: _fitted(mib) for mib in by_size} == by_size
        assert chunked_plan.automatic("all_gather_matmul") == ("copy_engine", "sm_push")
        assert _fitted(1, transport="courier") == "courier"
    with toy.registered(toy.Courier(fastest_from=32 * MIB)):
        assert {mib: _fitted(mib) for mib in by_size} == {**by_size, 64: "courier"}
        assert chunked_plan.automatic("all_gather_matmul") == ("copy_engine", "sm_push", "courier")


def test_the_plan_of_a_fused_gather_names_a_copier_that_is_not_the_default() -> None:
    with toy.registered(toy.Courier()):
        settings = {name: fused_plan.settings_for("all_gather_matmul", name) for name in ("copy_engine", "courier")}
    assert settings["courier"] == {**settings["copy_engine"], "copier": "courier"}
    assert settings["copy_engine"]["copies_from"] == 0


def test_an_object_that_is_not_a_transport_is_refused() -> None:
    class Half:
        name = "half"
        moved_by = "nothing"

        def why_not(self, group_name: str, device: object) -> None:
            return None

    with pytest.raises(TypeError, match="must have all members of PeerCopies or Exchanges or WholeCollectives"):
        registry.register(Half())
    with pytest.raises(ValueError, match="'p2p' cannot be the name of a transport"):
        registry.register(toy.Pigeons(name="p2p"))
    assert len(registry.transports()) == 4


def test_a_transport_that_is_not_registered_is_an_error_that_names_it() -> None:
    with pytest.raises(UnsupportedError, match="transport 'pigeons' is not registered in this process; expected.* p2p"):
        registry.transport_named(Exchanges, "pigeons")
