# SPDX-License-Identifier: Apache-2.0
"""The host launches some calls directly, and replays others as a CUDA graph. A fake recorder takes the place of the
GPU."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_inductor.lowerings.chunked import contracted_launch
from overlap_inductor.lowerings.chunked import exchange_launch
from overlap_inductor.lowerings.chunked import gather_launch
from overlap_inductor.lowerings.chunked import reduce_launch
from overlap_inductor.lowerings.chunked.parameters import ChunkedParameters
from overlap_inductor.lowerings.fused import calls as fused
from overlap_inductor.lowerings.fused import contraction
from overlap_inductor.lowerings.fused import received
from overlap_inductor.lowerings.fused.launch import Tail
from overlap_inductor.lowerings.fused.parameters import FusedParameters
from overlap_inductor.lowerings.one_op.vendor_matmul import Scales
from overlap_inductor.lowerings.one_op.vendor_matmul import SlicedMatmul
from overlap_inductor.lowerings.one_op.vendor_matmul import VendorMatmul
from overlap_inductor.lowerings.small_message import launch as small_message
from overlap_inductor.lowerings.small_message.parameters import SmallParameters
from overlap_inductor.runtime import driver
from overlap_inductor.runtime import replay
from overlap_inductor.runtime.replay import Recorder
from overlap_inductor.runtime.replay import launched
from overlap_inductor.sites.epilogue_program import Epilogue
from overlap_inductor.torch_compat import blas
from overlap_inductor.torch_compat import symmetric


@pytest.fixture(autouse=True)
def several_queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    symmetric.hardware_queues.cache_clear()
    yield
    symmetric.hardware_queues.cache_clear()


class Noted:
    """A fake launch. ``done`` records ``start`` (the host launched the call), ``graph`` (a graph was launched) and
    ``abort`` (the group was aborted). ``failing``: numbers of the graph launches that fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, graphs: bool = True, device: str = "cuda") -> None:
        self.done: list[str] = []
        faults = SimpleNamespace(abort=lambda: self.done.append("abort"))
        self.launch: Any = SimpleNamespace(
            slot=SimpleNamespace(calls=SimpleNamespace(device=torch.device(device))), seen={}, replays={}, faults=faults
        )
        self.captures = self.launches = 0
        self.failing: set[int] = set()
        self.inside = False

        def replay_of(start: Callable[[], None]) -> Callable[[], None] | None:
            self.captures += 1
            return self._graph if graphs else None

        monkeypatch.setattr(replay, "recorder", lambda device: SimpleNamespace(replay_of=replay_of))
        monkeypatch.setattr(symmetric, "capturing", lambda: self.inside)
        monkeypatch.setattr(driver, "allocation", lambda address: self.allocations.get(address, 0))
        self.allocations: dict[int, int] = {}
        """``{address: number of its allocation}``. Other addresses have number 0."""

    def _graph(self) -> None:
        self.launches += 1
        if self.launches in self.failing:
            raise RuntimeError("out of memory")
        self.done.append("graph")

    def call(
        self,
        *tensors: torch.Tensor | None,
        what: object = "gather",
        replays: bool = True,
        copied: Sequence[torch.Tensor | None] = (),
    ) -> list[str]:
        """Make one call, and return its actions."""
        before = len(self.done)
        launched(self.launch, what, tensors, lambda: self.done.append("start"), replays, copied)
        return self.done[before:]


def test_the_second_call_with_the_same_tensors_is_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, a, b = Noted(monkeypatch), torch.zeros(4, 4), torch.zeros(4)
    assert [noted.call(a, b, None) for _ in range(4)] == [["start"], ["graph"], ["graph"], ["graph"]]
    assert noted.captures == 1


def test_a_copy_from_another_allocation_at_the_same_address_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a copied tensor's memory was freed and allocated again, CUDA refuses to launch the old graph. So a new graph
    is captured."""
    noted, a, b = Noted(monkeypatch), torch.zeros(4, 4), torch.zeros(4)
    for number in range(3):
        noted.allocations[a.data_ptr()] = number
        assert [noted.call(a, b, copied=[a, None]) for _ in range(3)] == [["start"], ["graph"], ["graph"]]
        assert len(noted.launch.replays) == len(noted.launch.seen) == 1, "the earlier graph must be dropped"
    noted.allocations[b.data_ptr()] = 1
    assert noted.call(a, b, copied=[a, None]) == ["graph"], "only copies depend on the allocation, kernels do not"


def test_memory_that_the_driver_does_not_know_is_not_replayed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noted, a = Noted(monkeypatch), torch.zeros(4, 4)

    def unknown(address: int) -> int:
        raise RuntimeError(f"cuPointerGetAttribute returned CUresult 1, for ({address},)")

    monkeypatch.setattr(driver, "allocation", unknown)
    replay._say_unknown.cache_clear()
    assert [noted.call(a, copied=[a]) for _ in range(3)] == [["start"]] * 3 and noted.captures == 0
    assert noted.call(torch.zeros(2), copied=[torch.zeros(2)]) == ["start"]
    assert len(caplog.records) == 1 and "started one by one (cuPointerGetAttribute returned CUresult 1)" in caplog.text


def test_memory_that_is_freed_after_every_call_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, a = Noted(monkeypatch), torch.zeros(4, 4)
    for number in range(5):
        noted.allocations[a.data_ptr()] = number
        assert noted.call(a, copied=[a]) == ["start"]
    assert noted.captures == 0


def test_any_difference_makes_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, a = Noted(monkeypatch), torch.zeros(4, 4)
    others: list[tuple[torch.Tensor | None, ...]] = [
        (a, None), (a[1:],), (a[:2],), (a[:, :2],), (a.t(),), (a.view(2, 8),), (a.view(torch.int32),),
        (torch.zeros(4, 4),), (a, a), (None,),
    ]  # fmt: skip
    noted.call(a)
    noted.call(a)
    assert [noted.call(*tensors) for tensors in others] == [["start"]] * len(others)
    assert noted.call(a, what="scatter") == ["start"]
    assert noted.call(a) == ["graph"]


def test_no_graph_is_made_in_a_users_capture_or_on_a_cpu_or_if_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.zeros(4)
    elsewhere = Noted(monkeypatch, device="cpu")
    assert [elsewhere.call(a) for _ in range(3)] == [["start"]] * 3
    noted = Noted(monkeypatch)
    noted.inside = True
    assert [noted.call(a) for _ in range(3)] == [["start"]] * 3
    noted.inside = False
    assert [noted.call(a, replays=False) for _ in range(3)] == [["start"]] * 3
    assert elsewhere.captures == noted.captures == 0
    # A launch in the user's capture does not count as a first call.
    assert [noted.call(a) for _ in range(2)] == [["start"], ["graph"]]


def test_with_one_hardware_queue_there_is_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    noted, a = Noted(monkeypatch), torch.zeros(4)
    assert [noted.call(a) for _ in range(3)] == [["start"]] * 3


def test_a_call_that_fails_is_not_captured_next(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, a = Noted(monkeypatch), torch.zeros(4)

    def fail() -> None:
        raise ValueError("no kernel")

    for _ in range(2):
        with pytest.raises(ValueError, match="no kernel"):
            launched(noted.launch, "gather", [a], fail, True)
    assert noted.captures == 0


def test_a_call_without_a_graph_is_launched_directly_and_not_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, a = Noted(monkeypatch, graphs=False), torch.zeros(4)
    assert [noted.call(a) for _ in range(4)] == [["start"]] * 4
    assert noted.captures == 1


def test_a_call_whose_graph_cannot_be_launched_is_launched_directly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    noted, a = Noted(monkeypatch), torch.zeros(4)
    noted.failing = {1}
    assert [noted.call(a) for _ in range(4)] == [["start"]] * 4
    assert noted.captures == 1 and "out of memory" in caplog.text


def test_a_graph_that_fails_later_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a graph fails at a later launch, the call raises and aborts the group. Without the abort, peers would wait
    until they time out."""
    noted, a = Noted(monkeypatch), torch.zeros(4)
    noted.failing = {3}
    assert [noted.call(a) for _ in range(3)] == [["start"], ["graph"], ["graph"]]
    with pytest.raises(RuntimeError, match="out of memory"):
        noted.call(a)
    assert noted.done[-1] == "abort"


def test_addresses_that_are_not_used_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    noted, memory = Noted(monkeypatch), torch.zeros(2 * replay.MOST_OF_A_SITE)
    for i in range(2 * replay.MOST_OF_A_SITE):
        assert noted.call(memory[i:]) == ["start"]
        assert len(noted.launch.seen) <= replay.MOST_OF_A_SITE
    assert noted.call(memory[i:]) == ["graph"], "the latest address is remembered"


def test_a_site_makes_no_more_graphs_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_OF_A_SITE", 3)
    noted, memory = Noted(monkeypatch), torch.zeros(8)
    for _ in range(3):
        for i in range(3):
            noted.call(memory[i:])
    assert [noted.call(memory[3:]) for _ in range(4)] == [["start"]] * 4
    assert noted.captures == 3 and noted.call(memory) == ["graph"]


class _Graph:
    def launch(self, stream: int) -> None:
        raise AssertionError("nothing is launched here")


def test_no_more_graphs_at_once_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replay, "MOST_GRAPHS", 2)
    monkeypatch.setattr(Recorder, "_captured", lambda self, start, inference: _Graph())
    recorder = Recorder(torch.device("cuda", 0))
    kept = [recorder.replay_of(lambda: None) for _ in range(4)]
    assert [k is None for k in kept] == [False, False, True, True]
    assert [r.levelno for r in caplog.records] == [
        logging.WARNING
    ] and "2 CUDA graphs hold launches of sites" in caplog.text
    kept.clear()
    gc.collect()
    assert recorder.replay_of(lambda: None) is not None and recorder.made == 3


@pytest.mark.parametrize("error", [RuntimeError, OSError, AttributeError, KeyError])
def test_a_failing_capture_is_logged_and_given_up_after_some_tries(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Recorder, start: object, inference: bool) -> None:
        raise error("operation not permitted when stream is capturing")

    monkeypatch.setattr(Recorder, "_captured", fail)
    recorder = Recorder(torch.device("cuda", 0))
    assert [recorder.replay_of(lambda: None) for _ in range(2 * replay.MOST_FAILED)] == [None] * 2 * replay.MOST_FAILED
    assert len(caplog.records) == replay.MOST_FAILED and "not permitted" in caplog.text


def test_a_graph_is_captured_on_another_thread_in_the_callers_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the order of the steps around the capture, without a GPU."""
    import threading
    from contextlib import contextmanager

    said: list[Any] = []

    @contextmanager
    def entered(name: str, value: object) -> Iterator[None]:
        said.append((name, value))
        yield
        said.append(f"end of {name}")

    def graph(start: Callable[[], None], stream: int) -> object:
        said.append(stream)
        start()
        return _Graph()

    place = (SimpleNamespace(cuda_stream=77), "pool")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: said.append(device))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: entered("pool", pool))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered("stream", stream))
    monkeypatch.setattr(Recorder, "_prepared", lambda self: place)
    monkeypatch.setattr(replay, "Graph", graph)
    recorder, here = Recorder(torch.device("cuda", 3)), threading.get_ident()

    def start() -> None:
        said.append((threading.get_ident() != here, torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    for inference in (False, True):
        with torch.inference_mode(inference):
            assert recorder.replay_of(start) is not None
        assert said == [
            torch.device("cuda", 3), ("pool", "pool"), ("stream", place[0]), 77, (True, inference, False),
            "end of stream", "end of pool",
        ]  # fmt: skip
        said.clear()


Call = tuple[Any, list[object]]


def _addresses(tensors: Any) -> list[object]:
    return [None if t is None else t.data_ptr() for t in tensors]


copies: list[list[object]] = []
"""For each of ``calls``, the addresses of the tensors that it declares as copied."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """For each call that a schedule passes to ``launched``: the argument ``what``, and the addresses of the tensors."""
    found: list[Call] = []

    def note(launch: object, what: object, tensors: Any, start: object, replays: bool, copied: Any = ()) -> None:
        found.append((what, _addresses(tensors)))
        copies.append(_addresses(copied))

    copies.clear()

    monkeypatch.setattr(gather_launch, "launched", note)
    monkeypatch.setattr(reduce_launch, "launched", note)
    monkeypatch.setattr(exchange_launch, "launched", note)
    monkeypatch.setattr(fused, "launched", note)
    monkeypatch.setattr(received, "launched", note)
    monkeypatch.setattr(small_message, "launched", note)
    return found


LAUNCH: Any = SimpleNamespace(world_size=2, rank=0, faults=SimpleNamespace(check=lambda: None))


def test_the_key_of_a_chunked_call_holds_all_that_the_call_depends_on(calls: list[Call]) -> None:
    a, b, bias, scale, other = (torch.zeros(s) for s in ((8, 8), (8, 8), (8,), (1,), (1,)))
    p, q = ChunkedParameters(2), ChunkedParameters(2)

    def matmul(fast: bool = False) -> VendorMatmul:
        return VendorMatmul(b, bias, Scales(scale, other, torch.float32, fast))

    outs = gather_launch.all_gather_matmul(a, [matmul()], LAUNCH, p, gathered_used=True)
    assert {t.data_ptr() for t in (a, b, bias, scale, other, *outs)} == {*calls[0][1]}
    gather_launch.all_gather_matmul(a, [matmul(True)], LAUNCH, p)
    gather_launch.all_gather_matmul(a, [matmul()], LAUNCH, q)
    for average in (False, True):
        out = reduce_launch.matmul_reduce_scatter(a, matmul(), LAUNCH, p, average)
        assert {t.data_ptr() for t in (a, b, bias, scale, other, out)} < {*calls[-1][1]} and len(calls[-1][1]) == 7, (
            "the key must hold the product's address, too"
        )
        out = reduce_launch.matmul_all_reduce(a, matmul(), LAUNCH, p, average)
        assert {t.data_ptr() for t in (a, b, bias, scale, other, out)} == {*calls[-1][1]}, "summed in place"
    assert len({what for what, _ in calls}) == len(calls) == 7
    assert copies == [addresses for _, addresses in calls], (
        "copy engines send some of the tensors, and the vendor's library may copy a bias or a scale"
    )
    left, right = torch.zeros(8, 4), torch.zeros(4, 8)
    reduce_launch.matmul_reduce_scatter(a, VendorMatmul(b, bias, added=((left, right),)), LAUNCH, p)
    assert {left.data_ptr(), right.data_ptr()} < {*calls[-1][1]}


def test_the_key_of_an_exchange_in_chunks_holds_all_that_the_call_depends_on(calls: list[Call]) -> None:
    a, b, tall, bias = (torch.zeros(s) for s in ((8, 8), (8, 8), (16, 8), (8,)))
    p, q = ChunkedParameters(2), ChunkedParameters(2)
    for parameters in (p, q):
        for matmul in (VendorMatmul(b, bias), SlicedMatmul(b, bias, count=2)):
            out = exchange_launch.matmul_all_to_all(a, matmul, LAUNCH, parameters)
            assert [*calls[-1][1]] == [t.data_ptr() for t in (a, out, b, bias)]
        out, received = gather_launch.all_to_all_matmul(a, [VendorMatmul(b, bias)], LAUNCH, parameters, True)
        assert {t.data_ptr() for t in (a, b, bias, out, received)} == {*calls[-1][1]}
        for used in (False, True):
            made = contracted_launch.contracted_all_to_all_matmul(
                a, [VendorMatmul(tall, bias)], LAUNCH, parameters, used
            )
            assert {t.data_ptr() for t in (a, tall, bias, *made)} <= {*calls[-1][1]} and len(calls[-1][1]) == 5, (
                "the key must hold the operand's address, too"
            )
    gather_launch.all_gather_matmul(a, [VendorMatmul(b, bias)], LAUNCH, p)
    assert len({what for what, _ in calls}) == len(calls) == 11 and copies == [addresses for _, addresses in calls]


def test_the_key_of_a_fused_call_holds_all_that_the_call_depends_on(calls: list[Call]) -> None:
    a, b, bias, extra = (torch.zeros(s) for s in ((8, 8), (8, 8), (8,), (1,)))
    p, q = FusedParameters(2), FusedParameters(2)
    tails = [
        Tail(),
        Tail((Epilogue(("scalar",), (("mul", "x", "e0"),)),), [extra]),
        Tail((Epilogue(("scalar",), (("add", "x", "e0"),)),), [extra]),
    ]
    for tail in tails:
        for keep in (False, True):
            read = [t.data_ptr() for t in (a, b, bias, *tail.extras)]
            (out,) = fused.all_gather_matmuls(a, [b], LAUNCH, p, [bias], keep, tail)
            assert calls[-1][1] == read and calls[-1][0][5:] == (out.data_ptr(),)
            out = fused.matmul_reduce_scatter(a, b, LAUNCH, p, bias, keep, tail)
            assert calls[-1][1] == read and calls[-1][0][5:] == (out.data_ptr(),)
            out = fused.matmul_all_reduce(a, b, LAUNCH, p, bias, keep, tail)
            assert (
                calls[-1][1] == read
                and calls[-1][0][6:] == (out.data_ptr(),)
                and calls[-1][0][5] not in {*read, out.data_ptr()}
            ), "the key must hold the product's address, too"
    fused.all_gather_matmuls(a, [b], LAUNCH, q, [bias])
    assert len({what[:5] for what, _ in calls}) == len(calls) == 19 and not any(copies), (
        "kernels read and write all of these tensors, so the call declares no tensor as copied"
    )
    fused.all_gather_matmuls(a, [b], LAUNCH, FusedParameters(2, copies_from=a.nbytes), [bias])
    assert copies.pop() == [a.data_ptr()]
    # If all tiles are whole, the product is summed in place, at the address of the result.
    a = torch.zeros(256, 8)
    out = fused.matmul_all_reduce(a, b, LAUNCH, p, bias)
    assert calls[-1][0][5:] == (out.data_ptr(), out.data_ptr())


def test_settings_of_the_vendors_library_make_another_call(calls: list[Call]) -> None:
    settings, a = torch.backends.cuda.matmul, torch.zeros(8, 8)
    changed = settings.allow_bf16_reduced_precision_reduction
    p, before = ChunkedParameters(2), blas.switches()
    try:
        for value in (changed, not changed):
            settings.allow_bf16_reduced_precision_reduction = value
            gather_launch.all_gather_matmul(a, [VendorMatmul(a)], LAUNCH, p)
            reduce_launch.matmul_reduce_scatter(a, VendorMatmul(a), LAUNCH, p)
    finally:
        settings.allow_bf16_reduced_precision_reduction = changed
    assert len({what for what, _ in calls}) == 4 and blas.switches() == before


def test_the_key_of_a_small_message_holds_all_that_the_call_depends_on(calls: list[Call]) -> None:
    a, b, bias, residual, weight = (torch.zeros(s) for s in ((8, 8), (8, 8), (8,), (8, 8), (8,)))
    p, q = (SmallParameters(False, 256) for _ in range(2))
    for parameters in (p, q):
        for average in (False, True):
            out = small_message.matmul_all_reduce(a, b, bias, LAUNCH, parameters, average)
            assert calls[-1][1] == [t.data_ptr() for t in (a, b, bias)] and calls[-1][0][4:] == (out.data_ptr(),)
    results = small_message.matmul_all_reduce_norm(a, b, None, residual, weight, 1e-5, LAUNCH, p)
    assert calls[-1][1] == [a.data_ptr(), b.data_ptr(), None, residual.data_ptr(), weight.data_ptr()] and calls[-1][0][
        4:
    ] == tuple(t.data_ptr() for t in results)
    small_message.matmul_all_reduce_norm(a, b, None, residual, weight, 1e-6, LAUNCH, p)
    assert len({(what[:4], tuple(addresses)) for what, addresses in calls}) == len(calls) == 6
    assert copies == [[bias.data_ptr()]] * 4 + [[]] * 2, "the vendor's library may copy a bias"


def test_the_key_of_a_fused_exchange_holds_all_that_the_call_depends_on(calls: list[Call]) -> None:
    a, b, bias = (torch.zeros(s) for s in ((8, 8), (8, 8), (8,)))
    read = [t.data_ptr() for t in (a, b, bias)]
    for parameters in (FusedParameters(2), FusedParameters(2)):
        for flag in (False, True):
            out = fused.matmul_all_to_all(a, b, LAUNCH, parameters, bias, flag)
            assert calls[-1][1] == read and calls[-1][0][-1] == out.data_ptr()
            (out,) = fused.all_to_all_matmuls(a, [b], LAUNCH, parameters, [bias], flag)
            assert calls[-1][1] == read and calls[-1][0][-1] == out.data_ptr()
            out = contraction.contracted_all_to_all_matmul(a, b, LAUNCH, parameters, bias, flag)
            assert calls[-1][1] == read and calls[-1][0][-1] == out.data_ptr()
    # Results of two calls may have one address, so the keys must differ without it.
    assert len({what[:-1] for what, _ in calls}) == len(calls) == 12 and not any(copies)
    fused.all_to_all_matmuls(a, [b], LAUNCH, FusedParameters(2, copies_from=a.nbytes // LAUNCH.world_size), [bias])
    assert copies.pop() == [a.data_ptr()], "copy engines read all slices"
