# SPDX-License-Identifier: Apache-2.0
"""The graphs and the code of attention behind gathers of keys and values."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F

from overlap_inductor.report.report import OverlapReport
from tests.compile.readings import summary
from tests.support.context_parallel import LAYERS
from tests.support.context_parallel import all_queries
from tests.support.context_parallel import columns
from tests.support.context_parallel import flat
from tests.support.context_parallel import gathered
from tests.support.context_parallel import heads_first
from tests.support.context_parallel import tokens_first
from tests.support.fake_group import fake_group
from tests.support.fake_group import report_of
from tests.support.fake_group import reports_of
from tests.support.generated_code import events
from tests.support.generated_code import lines_of
from tests.support.golden import check_golden
from tests.support.golden import report_text
from tests.support.graph_text import waste

PATTERN = "all_gather_attention"
SITE = (PATTERN, 2, ["attention K"], "overlapped")
SLOW = json.dumps({"link_bytes": 6.25e7, "step_seconds": 3e-4})
attention = F.scaled_dot_product_attention


def _own(*, heads: int = 4, own: int = 8, count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(2, heads, own, 16) for _ in range(count)]


def _mask(own: int = 8, world_size: int = 2) -> torch.Tensor:
    return torch.ones(own, own * world_size, dtype=torch.bool)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="golden files are for torch 2.13")
@pytest.mark.parametrize(
    "file", ["attention/plain.txt", "attention/masked.txt", "attention/causal.txt", "attention/flat.txt"]
)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_golden(file: str, rank: int) -> None:
    """Site, decision and graphs are those of the golden file, on every rank."""
    kind = file.split("/")[1].split(".")[0]
    with fake_group(2, rank), torch.no_grad():
        mask = {"masked": _mask(), "causal": True}.get(kind)
        report = report_of(flat if kind == "flat" else heads_first, *_own(), mask)
    assert not waste(report)
    text = f"{report_text(report)}\nbefore\n{report.before}\nafter\n{report.after}"
    check_golden(text.rstrip() + "\n", file)


@pytest.mark.parametrize(
    ("world_size", "masked"), [pytest.param(2, False, marks=pytest.mark.thorough), (3, True), (8, False)]
)
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer is not all_queries])
def test_every_spelling_is_one_site(world_size: int, masked: bool, layer: Callable[..., Any]) -> None:
    """Keys and values are one site, whether one gather moves both or each has its own gather. The rewritten graph never
    joins gathered shards. If one gather moves both, the only ``cat`` joins the rank's own keys and values before this
    gather."""
    own = [x.transpose(1, 2).contiguous() if layer is tokens_first else x for x in _own()]
    with fake_group(world_size, world_size - 1), torch.no_grad():
        report = report_of(layer, *own, *([_mask(8, world_size)] if masked else []))
    apart = layer in (heads_first, tokens_first, columns)
    assert summary(report) == [SITE] and report.near_misses == []
    assert report.after.count("gather_start.default(") == (2 if apart else 1)
    assert report.after.count("aten._scaled_dot_product") == world_size
    assert report.after.count("aten.cat") == (0 if apart else 1)


@pytest.mark.parametrize("kind", ["self", "projected"])
def test_projections_before_the_gathers(kind: str) -> None:
    """The rewrite moves the projection of the queries before the gathers. The projection of the keys is no site of its
    own."""

    def layer(x: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor, wq: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.view(2, 8, 4, 16).transpose(1, 2)

        k, v = gathered(heads(x @ wk), 2), gathered(heads(x @ wv), 2)
        q = heads(x @ wq) if kind == "projected" else heads(x)
        return attention(q, k, v).transpose(1, 2).reshape(2, 8, 64)

    with fake_group(2), torch.no_grad():
        report = report_of(layer, torch.randn(2, 8, 64), *(torch.randn(64, 64) for _ in range(3)))
    assert summary(report) == [SITE] and not waste(report)


@pytest.mark.usefixtures("two")
def test_other_readers_get_the_gathered_tensor() -> None:
    """Another node also reads the gathered keys. For this node, the shards are joined after the last step."""

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = gathered(k, 2)
        return attention(q, k, gathered(v, 2)), k.sin()

    report = report_of(layer, *_own())
    assert summary(report) == [SITE]
    joined = next(line for line in report.after.splitlines() if "aten.cat" in line)
    assert report.after.index(joined) > report.after.rindex("gather_step")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.thorough), 3])
def test_attention_runs_while_the_next_keys_travel(world_size: int) -> None:
    """The transfers start before the attention to the rank's own keys. A shard is read directly after the wait for
    it."""
    lines = lines_of(heads_first, *[(2, 4, 8, 16)] * 3, world_size=world_size, rank=1)
    expected = ["start", "start", "attention", *["step", "step", "attention"] * (world_size - 1), "pointwise"]
    assert events(lines) == expected


def _miss(fn: Callable[..., Any], *args: torch.Tensor, **fields: Any) -> tuple[str, str]:
    report = report_of(fn, *args, **fields)
    assert summary(report) == []
    assert len({n.reason for n in report.near_misses}) == 1
    return report.near_misses[0].reason.code, report.near_misses[0].reason.text


@pytest.mark.usefixtures("two")
def test_what_is_no_site_has_a_reason() -> None:
    q, k, v = _own()

    def turned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = gathered(k, 2), gathered(v, 2)
        return attention(q, k.roll(1, 2), v)

    code, text = _miss(turned, q, k, v)
    assert code == "op_between" and "is between the all-gather and" in text

    def by_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, gathered(k, 1), gathered(v, 1))

    code, text = _miss(by_heads, *_own(heads=8)[:1], k, v)
    assert code == "layout" and "dim 1" in text

    def values_only(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, gathered(v, 2))

    code, text = _miss(values_only, q, *_own(own=16)[:1], v)
    assert code == "layout" and "not one gathered tensor" in text

    def cut(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, gathered(k, 2)[:, :, :15], gathered(v, 2)[:, :, :15])

    code, text = _miss(cut, q, k, v)
    assert code == "layout" and "expected one whole shard" in text, (code, text)

    def with_parts(parts: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
        def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            shards = gathered(torch.stack([k, v]), 0).chunk(2)
            return attention(q, *parts(shards))

        return layer

    code, text = _miss(
        with_parts(lambda s: (torch.cat([s[1][0], s[0][0]], 2), torch.cat([s[1][1], s[0][1]], 2))), q, k, v
    )
    assert code == "not_plain_gather" and "shards of the ranks [1, 0]" in text

    code, text = _miss(with_parts(lambda s: (torch.cat([s[0][0], s[1][1]], 2),) * 2), q, k, v)
    assert code == "not_plain_gather" and "different parts" in text

    code, text = _miss(with_parts(lambda s: s[1].unbind()), q, k, v)
    assert code == "layout" and "the shard of rank 1 alone" in text

    code, text = _miss(with_parts(lambda s: [torch.cat([s[0][i], s[1][i], q], 2) for i in range(2)]), q, k, v)
    assert code == "op_between" and "(aten.cat.default)" in text

    def some_columns(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        both = gathered(torch.cat([k, v], -1), 2)
        return attention(q, both[..., ::2].contiguous(), both[..., 1::2].contiguous())

    code, text = _miss(some_columns, q, k, v)
    assert code == "op_between" and "(aten.slice.Tensor)" in text

    def uneven_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        both = gathered(torch.cat([k, v], -1), 2).view(2, 4, 16, 4, 8).transpose(3, 4).flatten(3)
        return attention(q[..., :10], both[..., :10], both[..., 10:20])

    code, text = _miss(uneven_blocks, q, k, v)
    assert code == "layout" and "not whole blocks of 4" in text

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k = gathered(k, 2)
        return attention(q, k, gathered(v, 2), attn_mask=k[0, 0, :, 0].expand(8, 16))

    code, text = _miss(masked, q, k, v)
    assert code == "weight_depends_on_collective" and "expected only keys and values" in text


@pytest.mark.usefixtures("two")
def test_keys_and_values_of_different_groups() -> None:
    other = dist.new_group([0, 1])

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, gathered(k, 2), funcol.all_gather_tensor(v, 2, other))

    code, text = _miss(layer, *_own())
    assert code == "layout" and "different groups" in text


@pytest.mark.usefixtures("two")
def test_one_tensor_as_keys_and_values() -> None:
    """One gathered tensor is both keys and values. It is sent once."""

    def layer(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        k = gathered(k, 2)
        return attention(q, k, k)

    report = report_of(layer, *_own(count=2))
    assert summary(report) == [SITE] and report.after.count("gather_start.default(") == 1


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("keys_first", [True, False])
@pytest.mark.parametrize("other", ["matmul", "attention"])
def test_a_gather_of_another_site(other: str, keys_first: bool) -> None:
    """The gathered keys are also read by a matmul, or by an attention to other values. Of two attentions, the first one
    gets the gather. A matmul always gets the gather."""

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if keys_first:
            k = gathered(k, 2)
        v = gathered(v, 2)
        further = gathered(w, 2) if other == "attention" else w
        if not keys_first:
            k = gathered(k, 2)
        return attention(q, k, v), attention(q, k, further) if other == "attention" else k @ w

    last = torch.randn(16, 16) if other == "matmul" else torch.randn(2, 4, 8, 16)
    report = report_of(layer, *_own(), last)
    (site,), (near,) = report.sites, report.near_misses
    assert site.facts.pattern == ("all_gather_matmul" if other == "matmul" else PATTERN)
    assert site.decision.status == "overlapped" and not report.failures
    assert near.reason.code == "shares_nodes" and "the keys of" in near.reason.text


def test_training_graphs_are_kept_with_a_reason() -> None:
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (funcol.all_gather_tensor_autograd(x, 2, dist.group.WORLD) for x in (k, v))
        return attention(q, k, v)

    with fake_group(2):
        forward, backward = reports_of(layer, *(x.requires_grad_() for x in _own()))
    (site,) = forward.sites
    assert site.facts.pattern == PATTERN and site.decision.status == "refused"
    (reason,) = site.decision.reasons
    assert reason.code == "other_users" and "saved for the backward graph" in reason.text
    assert backward.sites == [] and len(backward.near_misses) == 2


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(("given", "said"), [((0.5,), "dropout_p=0.5"), ((0.0, True), "both is_causal and a mask")])
def test_forms_that_have_a_reason(given: tuple[Any, ...], said: str) -> None:
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return op(q, gathered(k, 2), gathered(v, 2), *given, attn_mask=mask)[0]

    code, text = _miss(layer, *_own(), torch.zeros(8, 16))
    assert code == "matmul_form" and said in text


def test_other_schedules_compute_no_attention() -> None:
    with fake_group(2), torch.no_grad():
        report = report_of(heads_first, *_own(), schedule="fused")
    (site,) = report.sites
    assert site.decision.status == "refused" and "computes all_gather_attention" in site.decision.reasons[0].text


def _planned(own: int, *mask: bool, layer: Callable[..., Any] = heads_first) -> OverlapReport:
    with fake_group(2), torch.no_grad():
        report = report_of(layer, *_own(own=own), *mask, schedule="auto", machine=SLOW)
    torch._dynamo.reset()
    return report


def test_the_planner_counts_keys_and_values() -> None:
    """On a slow link, long sequences are overlapped and short ones are not."""
    (many,), (few,) = _planned(1024).sites, _planned(8).sites
    estimate = many.decision.moving.estimate_us
    moved = 2 * 2 * 4 * 1024 * 16 * 4  # keys and values of one rank
    assert many.decision.status == "overlapped" and many.decision.source == "analytic"
    assert max(estimate["matmul"], moved / 62.5) <= estimate["ring"] < estimate["keep"]
    assert estimate["collective"] >= moved / 62.5
    assert (few.decision.status, few.decision.reasons[0].code) == ("kept", "too_small")


def test_the_planner_counts_the_hidden_keys_that_pieces_do_not_skip() -> None:
    """Causal attention as written does not compute masked scores. With 2 x 1024 keys, it computes a quarter of the
    scores of 1024 queries, and half of the scores of 2048 queries. The ring's pieces compute all scores."""
    for layer, share in ((heads_first, 4), (all_queries, 2)):
        (full,), (causal,) = (_planned(1024, *mask, layer=layer).sites for mask in ((), (True,)))
        whole, seen = (site.decision.moving.estimate_us for site in (full, causal))
        assert seen["matmul"] == pytest.approx(whole["matmul"] / share, rel=2e-3)
        assert seen["ring"] == pytest.approx(whole["ring"])
        assert seen["keep"] == pytest.approx(seen["matmul"] + seen["collective"], rel=1e-3)


def test_ranks_compare_both_gathers() -> None:
    with fake_group(2), torch.no_grad():
        report = report_of(heads_first, *_own()[:1], *_own(heads=2)[:1], torch.randn(2, 2, 8, 16))
    assert json.loads(report.exchange)["steps"] == [
        f"g0: all_gather float32 [2, 2, 8, 16] in {PATTERN} by ring/p2p (route=ring, sub_chunks=1)",
        "g0: all_gather float32 [2, 2, 8, 16] with the one before",
    ]


@pytest.mark.usefixtures("two")
def test_pieces_that_are_counted_from_the_end() -> None:
    """The slices have negative starts. The pass must convert each start to an index from 0."""

    def last_columns(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        both = gathered(torch.cat([k, v], -1), 2)
        return attention(q, both[..., -99:16], both[..., -16:])

    report = report_of(last_columns, *_own())
    assert summary(report) == [SITE] and report.failures == []
    assert report.after.count(", 3, 16, 32)") == 2

    def last_shard(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        both = gathered(torch.stack([k, v]), 0)
        first, last = both[:2], both[-2:]
        return attention(q, torch.cat([first[0], last[0]], 2), torch.cat([first[-1], last[-1]], 2))

    assert summary(report_of(last_shard, *_own())) == [SITE]


@pytest.mark.usefixtures("two")
def test_pieces_of_symbolic_sizes_have_a_reason() -> None:
    def joined(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        both = gathered(torch.cat([k, v], 1), 2)
        return attention(q, both[:, : q.shape[1]], both[:, q.shape[1] :])

    own = _own()
    for x in own:
        torch._dynamo.mark_dynamic(x, 1)
    code, text = _miss(joined, *own)
    assert code == "layout" and "expected sizes that are known at compile time" in text

    def from_the_end(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q[:1], gathered(k, 2)[-1:], gathered(v, 2)[-1:])

    code, text = _miss(from_the_end, *_own(), dynamic=True)
    assert code == "op_between" and "(aten.slice.Tensor)" in text


def test_symbolic_sizes() -> None:
    """The batch size is symbolic. So each transfer begins and ends at symbolic offsets in a shard."""
    with fake_group(2), torch.no_grad():
        report = report_of(heads_first, *_own(), dynamic=True)
    assert summary(report) == [SITE]
