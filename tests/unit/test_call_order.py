# SPDX-License-Identifier: Apache-2.0
"""Calls of overlap ops on one device run in the order in which the host makes them. This holds on any streams, from any
threads, in captures and in replays. Streams are simulated (``tests.support.fake_streams``)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_inductor.errors import UnsupportedError
from overlap_inductor.runtime import call_order
from overlap_inductor.runtime.call_order import CallOrder
from overlap_inductor.runtime.call_order import CapturedGraphs
from overlap_inductor.torch_compat import cuda_graphs
from tests.support.fake_streams import CUDA
from tests.support.fake_streams import Event
from tests.support.fake_streams import Gpu
from tests.support.fake_streams import run


class Rank:
    """One rank's GPU and the order of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = Gpu()
        self.monkeypatch = monkeypatch
        self.graphs = self.gpu.use(monkeypatch)
        captured = CapturedGraphs()
        cuda_graphs.observe(self.graphs, captured)
        self.order = CallOrder(CUDA, captured)
        self.first, self.second = self.gpu.stream(), self.gpu.stream()

    def call(self, name: str, stream: Any) -> None:
        with self.gpu.on(stream), self.order:
            stream.put("call", name)

    def captured(self, stream: Any, body: Callable[[], None], graph: Any = None) -> Any:
        graph = graph or self.graphs()
        with self.gpu.on(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        return graph

    def replay(self, graph: Any, stream: Any) -> None:
        with self.gpu.on(stream):
            graph.replay()

    def kinds(self, stream: Any) -> list[str]:
        return [kind if kind != "call" else what for kind, what in stream.queue]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def played(monkeypatch: pytest.MonkeyPatch, *programs: Callable[[Rank], None]) -> list[Any]:
    """Play each rank's program. Returns the work left in the ranks' queues, which is not empty after a deadlock."""
    ranks: list[Rank] = []
    for program in programs:
        ranks.append(Rank(monkeypatch))
        program(ranks[-1])
    return run([rank.gpu for rank in ranks])


def test_work_queued_behind_a_call_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call B waits for call A, and not for the receive that is queued after A on A's stream. If B waited for the
    receive, the ranks would deadlock: rank 1 sends only after its B, and B ends only when every rank has begun it."""

    def receives(rank: Rank) -> None:
        rank.call("A", rank.first)
        rank.first.put("recv", "rows")
        rank.call("B", rank.second)

    def sends(rank: Rank) -> None:
        rank.call("A", rank.first)
        rank.call("B", rank.second)
        event = Event()
        event.record(rank.second)
        rank.first.wait_event(event)
        rank.first.put("send", "rows")

    assert played(monkeypatch, receives, sends) == [[], []]


def test_calls_on_two_streams_begin_in_one_order_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def delayed(stream: str) -> Callable[[Rank], None]:
        def program(rank: Rank) -> None:
            getattr(rank, stream).put("recv", "go")
            rank.call("A", rank.first)
            rank.call("B", rank.second)
            rank.gpu.stream().put("send", "go")

        return program

    # The ranks delay different streams. Without an order, rank 0 would begin with B, and rank 1 with A.
    assert played(monkeypatch, delayed("first"), delayed("second")) == [[], []]


def test_a_call_waits_only_if_the_last_call_was_on_another_stream(rank: Rank) -> None:
    for name in "ABC":
        rank.call(name, rank.first)
    assert rank.kinds(rank.first) == ["A", "mark", "B", "mark", "C", "mark"]
    rank.call("D", rank.second)
    assert rank.kinds(rank.second) == ["wait", "D", "mark"] and rank.second.queue[0][1] is rank.first.queue[-1][1]


def test_a_call_inside_a_call_is_part_of_it(rank: Rank) -> None:
    with rank.gpu.on(rank.first), rank.order:
        rank.call("A", rank.first)
        rank.first.put("call", "B")
    assert rank.kinds(rank.first) == ["A", "B", "mark"]


def test_calls_of_two_threads_do_not_mix(rank: Rank) -> None:
    inside, entered = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait()
        with rank.order:
            entered.set()

    thread = threading.Thread(target=other)
    thread.start()
    with rank.order:
        inside.set()
        assert not entered.wait(0.2), "the second thread must wait while the first one launches"
    assert entered.wait(10)
    thread.join()


def test_the_launches_of_a_failed_call_are_ordered(rank: Rank) -> None:
    with pytest.raises(ValueError, match="no kernel"), rank.gpu.on(rank.first), rank.order:
        rank.first.put("call", "half of A")
        raise ValueError("no kernel")
    rank.call("B", rank.second)
    assert rank.kinds(rank.second) == ["wait", "B", "mark"]


def test_a_call_that_cannot_begin_does_not_block_other_threads(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.call("A", rank.first)
    with monkeypatch.context() as broken:
        broken.setattr(
            type(rank.second), "wait_event", lambda self, event: (_ for _ in ()).throw(RuntimeError("CUDA error"))
        )
        with pytest.raises(RuntimeError, match="CUDA error"):
            rank.call("B", rank.second)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (rank.call("C", rank.second), done.set()))
    thread.start()
    assert done.wait(10) and rank.kinds(rank.second) == ["wait", "C", "mark"]


def test_calls_in_a_capture_wait_only_for_each_other(rank: Rank) -> None:
    """CUDA refuses a wait across a capture's border. A wait in a capture must not be for an event from outside, and a
    wait outside must not be for an event of the capture."""
    rank.call("A", rank.first)

    def body() -> None:
        fork = Event()
        rank.call("B", rank.second)
        fork.record(rank.second)
        third = rank.gpu.stream()
        third.wait_event(fork)
        rank.call("C", third)

    graph = rank.captured(rank.second, body)
    assert [what if kind == "call" else kind for kind, what in graph.queue] == [
        "B",
        "mark",
        "mark",
        "wait",
        "wait",
        "C",
        "mark",
    ]
    marks = [what for kind, what in graph.queue if kind == "mark"]
    assert [what for kind, what in graph.queue if kind == "wait"] == [marks[1], marks[0]], "C must wait for B's end"
    rank.call("D", rank.second)
    assert rank.kinds(rank.second) == ["wait", "D", "mark"] and rank.second.queue[0][1] is rank.first.queue[-1][1], (
        "D must wait for A's end"
    )


def test_two_captures_at_once_do_not_wait_for_each_other(rank: Rank) -> None:
    one, other = rank.graphs(), rank.graphs()

    def body() -> None:
        rank.call("A", rank.first)
        rank.captured(rank.second, lambda: rank.call("B", rank.second), other)
        rank.call("C", rank.first)

    rank.captured(rank.first, body, one)
    assert [what for kind, what in one.queue if kind == "call"] == ["A", "C"] and not any(
        kind == "wait" for kind, _ in [*one.queue, *other.queue]
    )


def test_a_replay_is_one_call(rank: Rank) -> None:
    graph = rank.captured(rank.second, lambda: rank.call("A", rank.second))
    rank.call("B", rank.first)
    rank.replay(graph, rank.second)
    rank.call("C", rank.first)
    rank.replay(graph, rank.first)
    assert rank.kinds(rank.second) == ["wait", "A", "mark"] and rank.second.queue[0][1] is rank.first.queue[1][1]
    assert (
        rank.kinds(rank.first) == ["B", "mark", "wait", "C", "mark", "A", "mark"]
        and rank.first.queue[2][1] is rank.second.queue[-1][1]
    )


def test_replays_and_calls_on_another_stream_do_not_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(first: bool) -> Callable[[Rank], None]:
        def made(rank: Rank) -> None:
            graph = rank.captured(rank.second, lambda: rank.call("G", rank.second))
            (rank.first if first else rank.second).put("recv", "go")
            rank.call("A", rank.first)
            rank.replay(graph, rank.second)
            rank.gpu.stream().put("send", "go")

        return made

    assert played(monkeypatch, program(True), program(False)) == [[], []]


def test_a_graph_without_calls_is_left_alone(rank: Rank) -> None:
    graph = rank.captured(rank.second, lambda: rank.second.put("recv", "rows"))
    rank.call("A", rank.first)
    rank.replay(graph, rank.second)
    rank.call("B", rank.first)
    assert rank.kinds(rank.second) == [] and rank.kinds(rank.first) == ["A", "mark", "B", "mark"]


def test_a_graph_that_is_captured_again_without_calls_replays_none(rank: Rank) -> None:
    graph = rank.captured(rank.second, lambda: rank.call("A", rank.second))
    rank.captured(rank.second, lambda: None, graph)
    rank.replay(graph, rank.second)
    assert rank.kinds(rank.second) == []


def test_a_capture_that_replays_a_graph_with_calls_holds_calls(rank: Rank) -> None:
    inner = rank.captured(rank.second, lambda: rank.call("A", rank.second))
    outer = rank.captured(rank.first, lambda: rank.replay(inner, rank.first))
    rank.call("B", rank.first)
    rank.replay(outer, rank.second)
    assert rank.kinds(rank.second) == ["wait", "A", "mark"]


def test_a_capture_whose_replays_are_not_observed_is_refused(rank: Rank) -> None:
    rank.second.capture = 77
    rank.gpu.captures[77] = rank.graphs()
    with pytest.raises(UnsupportedError, match="capture it with torch.cuda.graph"):
        rank.call("A", rank.second)
    rank.second.capture = 0
    rank.call("B", rank.first)
    assert rank.kinds(rank.first) == ["B", "mark"], "other calls must still run"


def test_a_call_that_fails_in_a_capture_raises_its_own_error(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        with rank.order:
            monkeypatch.setattr(
                Event, "record", lambda self, stream: (_ for _ in ()).throw(RuntimeError("the capture is lost"))
            )
            raise ValueError("no kernel")

    with pytest.raises(ValueError, match="no kernel"):
        rank.captured(rank.second, body)


def test_a_capture_without_a_number_still_holds_the_programs_work(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(raw: int) -> int:
        raise RuntimeError("cuStreamGetCaptureInfo_v2 returned CUresult 500")

    monkeypatch.setattr(call_order.driver, "capture_number", fail)
    graph = rank.captured(rank.second, lambda: rank.second.put("call", "foreign"))
    rank.replay(graph, rank.second)
    assert rank.kinds(rank.second) == ["foreign"] and "can be captured in it (cuStreamGetCaptureInfo_v2" in caplog.text


def test_in_flight_asks_the_event_at_the_end_of_the_last_call(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, waited = [False], []

    def beside(result: Any) -> Any:
        assert rank.gpu.beside_captures == 1, "the query would invalidate a capture of another thread"
        return result

    monkeypatch.setattr(Event, "query", lambda self: beside(reached[0]), raising=False)
    monkeypatch.setattr(Event, "synchronize", lambda self: beside(waited.append(self)), raising=False)
    assert not rank.order.in_flight(), "there was no call"
    rank.order.finish()
    rank.captured(rank.second, lambda: rank.call("A", rank.second))
    assert not rank.order.in_flight() and not waited, "a captured call does not run"
    rank.call("B", rank.first)
    assert rank.order.in_flight()
    reached[0] = True
    assert not rank.order.in_flight()
    rank.order.finish()
    assert len(waited) == 1


def test_memory_of_a_destroyed_group_is_freed_after_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from overlap_inductor.runtime import workspace
    from overlap_inductor.runtime.group_state import held_by
    from tests.support.fake_group import fake_group

    cpu, held = torch.device("cpu"), list[bool]()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(call_order, "_ORDERS", {CUDA: CallOrder(CUDA, CapturedGraphs())})
    with fake_group(2) as destroyed:
        place = workspace.workspace_of(destroyed, cpu)
        place.arena.device = CUDA
    monkeypatch.setattr(CallOrder, "finish", lambda self: held.append(place in held_by(destroyed).values()))
    with fake_group(2) as group:
        workspace.workspace_of(group, cpu)
        assert held == [True] and not held_by(destroyed)


def test_observed_graphs_behave_as_before() -> None:
    said: list[Any] = []

    class Plain:
        def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> str:
            """Begins."""
            said.append((pool, capture_error_mode))
            return "begun"

        def capture_end(self) -> None:
            raise RuntimeError("invalidated")

        def replay(self) -> str:
            said.append("replay")
            return "replayed"

    class Derived(Plain):
        def replay(self) -> str:
            return super().replay()

    observer = SimpleNamespace(
        begun=lambda graph: said.append("begun"),
        ended=lambda graph: said.append("ended"),
        replaying=lambda graph: (said.append("replaying"), nullcontext())[1],
    )
    cuda_graphs.observe(Plain, observer)
    graph = Derived()
    assert (
        graph.capture_begin("pool", capture_error_mode="relaxed") == "begun"
        and Plain.capture_begin.__doc__ == "Begins."
    )
    with pytest.raises(RuntimeError, match="invalidated"):
        graph.capture_end()
    assert graph.replay() == "replayed"
    assert said == [("pool", "relaxed"), "begun", "ended", "replaying", "replay"]


def test_torchs_graphs_have_the_methods_that_are_wrapped() -> None:
    assert all(callable(getattr(torch.cuda.CUDAGraph, name)) for name in ("capture_begin", "capture_end", "replay"))


def test_each_gpu_has_one_order_and_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[object] = []
    monkeypatch.setattr(call_order, "_ORDERS", {})
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(cuda_graphs, "observe", lambda graphs, observer: observed.append(graphs))
    assert isinstance(call_order.call_order(torch.device("cpu")), nullcontext)
    devices = [torch.device("cuda", index) for index in (0, 1, 0)]
    a, b, c = map(call_order.call_order, devices)
    assert a is c is not b and observed == [torch.cuda.CUDAGraph]


class Inside:
    """Takes the place of ``call_order``. ``seen`` has one entry for each call of a function that ``launches`` made. It
    is 1 if the call is inside the order, that is inside ``with call_order(device)``, and 0 if not."""

    def __init__(self) -> None:
        self.depth = 0
        self.seen: list[int] = []

    def __call__(self, device: torch.device) -> Inside:
        return self

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1

    def launches(self, result: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **named: Any) -> Any:
            self.seen.append(self.depth)
            return result

        return launch


def test_ops_of_four_schedules_launch_inside_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "triton",
        reason="Triton comes with the package's test extra; an environment without this extra has none",
    )
    from overlap_inductor.lowerings.chunked import exchange_launch
    from overlap_inductor.lowerings.chunked import gather_launch
    from overlap_inductor.lowerings.chunked import ops as chunked_ops  # noqa: F401
    from overlap_inductor.lowerings.chunked import reduce_launch
    from overlap_inductor.lowerings.chunked import scaled_ops as chunked_scaled_ops
    from overlap_inductor.lowerings.chunked import sum_ops as chunked_sum_ops
    from overlap_inductor.lowerings.fused import ops as fused_ops
    from overlap_inductor.lowerings.fused import table_calls
    from overlap_inductor.lowerings.fused import table_ops
    from overlap_inductor.lowerings.one_op import exchange_ops
    from overlap_inductor.lowerings.one_op import ops as site_ops
    from overlap_inductor.lowerings.small_message import launch as small_message
    from overlap_inductor.lowerings.small_message import ops as small_ops
    from overlap_inductor.lowerings.wave_groups import launch as wave_groups
    from tests.support.fake_group import fake_group

    inside = Inside()
    x, w, chain = torch.zeros(4, 8), torch.zeros(8, 8), torch.zeros(1)
    modules: Sequence[Any] = (
        site_ops, exchange_ops, fused_ops, table_ops, small_ops, chunked_scaled_ops, chunked_sum_ops, wave_groups,
    )  # fmt: skip
    for module in modules:
        monkeypatch.setattr(module, "call_order", inside)
        if module not in (table_ops, small_ops, wave_groups):
            monkeypatch.setattr(module, "ready", lambda *arguments: ("launch", "parameters"))
    monkeypatch.setattr(small_ops, "_ready", lambda *arguments: ("launch", "parameters"))
    monkeypatch.setattr(table_ops, "_ready", lambda *arguments: ("launch", "parameters"))
    for name in ("all_gather_matmul", "all_to_all_matmul"):
        monkeypatch.setattr(gather_launch, name, inside.launches([x]))
    monkeypatch.setattr(reduce_launch, "matmul_all_reduce", inside.launches(x))
    monkeypatch.setattr(exchange_launch, "matmul_all_to_all", inside.launches(x))
    monkeypatch.setattr(table_calls, "look_up", inside.launches(x))
    monkeypatch.setattr(fused_ops, "_gather", inside.launches([x]))
    monkeypatch.setattr(fused_ops, "_reduce", inside.launches(x))
    monkeypatch.setattr(small_message, "matmul_all_reduce", inside.launches(x))
    monkeypatch.setattr(small_message, "matmul_all_reduce_norm", inside.launches((x, x)))
    monkeypatch.setattr(
        wave_groups,
        "waves_of",
        inside.launches(SimpleNamespace(place=SimpleNamespace(faults=SimpleNamespace(check=lambda: None)))),
    )
    monkeypatch.setattr(wave_groups, "check_operands", lambda *arguments: None)
    monkeypatch.setattr(
        wave_groups, "Call", lambda *arguments: SimpleNamespace(run=inside.launches(x), plan=lambda: None)
    )
    ops = torch.ops.overlap_inductor
    with fake_group(2) as group:
        end = (group.group_name, "site")
        one = torch.ones(1)
        ops.chunked_all_gather_matmul(chain, x, [w], [None], False, "{}", *end)
        ops.chunked_matmul_all_reduce(chain, x, w, None, "{}", "sum", *end)
        ops.chunked_matmul_all_to_all(chain, x, w, None, False, "{}", *end)
        ops.chunked_all_to_all_matmul(chain, x, [w], [None], False, "{}", *end)
        some = torch.zeros(4, dtype=torch.int64)
        ops.fused_embedding_all_to_all(chain, [w], [some], [], [], [-1], "sum", False, False, False, "{}", *end)
        ops.fused_all_gather_matmul_epilogue(chain, x, [w], [None], False, [], "[null]", "{}", *end)
        ops.fused_matmul_all_reduce_epilogue(chain, x, w, None, [], "[null]", "{}", "sum", *end)
        ops.small_message_matmul_all_reduce(chain, x, w, None, "{}", "sum", *end)
        ops.small_message_matmul_all_reduce_norm(chain, x, w, None, x, w[0], 1e-5, "{}", *end)
        ops.chunked_sum_matmul_all_reduce(chain, [x, x], [w, w], None, "{}", "sum", *end)
        ops.chunked_scaled_matmul_all_reduce(chain, x, w, None, one, one, "float32", False, "{}", "sum", *end)
        ops.chunked_scaled_all_gather_matmul(
            chain, x, [w], [None], [one], [one], ["float32"], [False], False, "{}", *end
        )
        wave_groups.matmul_all_reduce(x, w, group, None, "site")  # type: ignore[arg-type]
    # ``wave_groups`` adds two of the 14 entries of ``seen``: one when it asks for its shared state, one when it
    # launches. The request must be inside the order, too, so that only one thread at a time makes the
    # shared state.
    assert inside.seen == [1] * 14 and inside.depth == 0
