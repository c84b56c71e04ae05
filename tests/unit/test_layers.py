# SPDX-License-Identifier: Apache-2.0
"""``bench.layers`` without ranks: its command line, its variants, the times that it reads from a trace, its table and
its picture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import layer_trace_gpu
from bench import layer_variants
from bench import layers
from bench import plots
from bench import tables
from bench.layer_trace import OUTSIDE
from bench.layer_trace import Span
from bench.layer_trace import bars
from bench.layer_trace import shares
from bench.layer_variants import AGAIN
from bench.layer_variants import LOCAL
from bench.layer_variants import PLAIN
from bench.layers_worker import Settings
from bench.layers_worker import error
from overlap_inductor.config import OverlapConfig
from tests.support.fake_group import fake_group
from tests.support.hand_graph import HandGraph
from tests.support.hand_graph import aten


def row(variant: str, ms: float, **fields: Any) -> dict[str, Any]:
    counts = {"all_reduce": 5, "all_gather_into_tensor": 1}
    return {
        "ranks": 2, "link": "500 Mbit/s", "layers": 2, "phase": "forward", "batch": 1, "tokens": 1024,
        "variant": variant,
        "median_ms": ms, "p20_ms": 0.9 * ms, "p80_ms": 1.1 * ms, "speedup": round(700 / ms, 3), "fastest_ms": 0.8 * ms,
        "tokens_per_s": 1024e3 / ms, "peak_mib": 900.4, "step_mib": 512.4, "compile_s": 12.3, "collectives": counts,
        "collectives_left": {}, "sites": {}, "load": 2.3, **fields,
    }  # fmt: skip


def test_the_settings_reach_the_ranks() -> None:
    options = layers.parsed(
        ["--layers", "1", "--hidden", "64", "--variants", "ring", "--phases", "decode", "training"]
        + ["--set", "sub_chunks=2", "--ranks", "2", "--megabits", "500"]
    )
    megabits, settings = layers.on_link(options, 0, 1e11, 8e9)
    assert megabits == 500 and settings.link == "500 Mbit/s"
    assert Settings.from_json(json.dumps(dataclasses.asdict(settings))) == settings
    assert (settings.sizes.layers, settings.sizes.hidden, settings.sizes.ffn) == (1, 64, layers.CPU.ffn)
    assert settings.switches == {"sub_chunks": "2"}
    assert settings.cases == (("decode", 1, 1), ("training", 1, 1024))
    told = json.loads(OverlapConfig(machine=settings.machine).machine or "")
    assert told == {"link_bytes": 6.25e7, "matmul_flops": {"4": 1e11}, "packing_bytes": 8e9}


def test_the_link_s_rate_makes_matmuls_and_transfers_take_equally_long() -> None:
    """A layer of 2 ranks multiplies 12.84e6 weights by each token, half of them on each rank. Each of its two
    all-reduces sends 1024 fp32 features of each token once."""
    options = layers.parsed([])
    assert options.ranks == [2, 4] and layers.on_link(options, 0, 1e11, 8e9)[0] == 500
    seconds_of_matmuls, seconds_of_transfers = 12.84e6 / 1e11, 2 * 1024 * 4 / (500e6 / 8)
    assert seconds_of_matmuls == pytest.approx(seconds_of_transfers, rel=0.05)
    assert layers.on_link(options, 1, 1e11, 8e9)[0] == 750
    assert layers.on_link(layers.parsed(["--kv-heads", "8"]), 0, 1e11, 8e9)[0] == 550


def test_cases_are_those_asked_for() -> None:
    options = layers.parsed("--device cuda --phases forward decode --tokens 64 128 --batches 2".split())
    found = layers.settings_of(options, layers.CUDA, "GPUs of one host", "")
    assert found.cases == (("forward", 1, 64), ("forward", 1, 128), ("decode", 2, 1))
    assert [layers.sizes_of(layers.parsed([]), n).hidden for n in (2, 4)] == [1024, 2048]
    options = layers.parsed(["--device", "cuda"])
    everything = layers.settings_of(options, layers.sizes_of(options, 2), "GPUs of one host", "")
    assert everything.sizes == layers.CUDA
    assert everything.cases == tuple(layers.CUDA_CASES) and everything.machine == ""


@pytest.mark.parametrize(
    "words",
    [
        ["--ranks", "2", "4", "--megabits", "500"],
        ["--set", "sub_chunks"],
        ["--repeats", "1"],
        ["--dynamic", "8", "--phases", "decode"],
        ["--dynamic", "8", "--device", "cuda"],
    ],
)
def test_bad_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        layers.parsed(words)


def test_every_variant_with_overlap_has_allowed_switches_and_machine_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[str]:
        return [v.name for v in layer_variants.variants("ring", '{"link_bytes": 6.25e7}', {"sub_chunks": "2"})]

    for variant in layer_variants.variants("ring", '{"link_bytes": 6.25e7}', {"sub_chunks": "2"}):
        config = OverlapConfig(**(variant.switches or {}))
        assert (config.machine is not None) == (variant.switches is not None)
        assert variant.right == (variant.name != LOCAL)
        assert config.sub_chunks == ("auto" if variant.switches is None else 2)
    assert (found()[0], found()[-2:]) == (PLAIN, [AGAIN, LOCAL])

    @dataclasses.dataclass
    class With:
        sequence_parallel: str = "auto"

    @dataclasses.dataclass
    class Without:
        mode: str = "on"

    monkeypatch.setattr(layer_variants, "OverlapConfig", Without)
    assert found() == [PLAIN, "ring", "auto", AGAIN, LOCAL]
    monkeypatch.setattr(layer_variants, "OverlapConfig", With)
    assert found()[1:-2] == [f"{n}, sequence_parallel {v}" for n, v in
                             (("ring", "off"), ("ring", "on"), ("auto", "off"), ("auto", "auto"))]  # fmt: skip


def test_removing_the_collectives_keeps_the_shapes() -> None:
    with fake_group(2):
        made = HandGraph()
        x = made.input(8, 16)
        gathered = made.gather(x)
        scattered = made.scatter(made.call(aten.relu.default, gathered))
        reduced = made.reduce(made.call(aten.relu.default, x))
        made.output(gathered, scattered, reduced)
        layer_variants._without_collectives(made.graph)
        made.graph.lint()
    assert layer_variants.counted([str(made.graph)]) == {}
    module = torch.fx.GraphModule(torch.nn.Module(), made.graph)
    outputs = module(torch.randn(8, 16))
    assert [tuple(y.shape) for y in outputs] == [(16, 16), (8, 16), (8, 16)]


def test_collectives_are_counted_by_kind() -> None:
    text = (
        "a = torch.ops._c10d_functional.all_reduce.default(x)\n"
        "w = torch.ops._c10d_functional.wait_tensor.default(a)\n"
        "b = torch.ops._c10d_functional.reduce_scatter_tensor.default(x)\n"
    )
    assert layer_variants.counted([text, text]) == {"all_reduce": 2, "reduce_scatter_tensor": 2}


def test_the_error_is_relative_and_never_hides_a_missing_or_bad_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.layers_worker.greatest", lambda value: value)
    right = {"x": torch.tensor([4.0, -8.0]), "y": torch.tensor([0.5])}
    assert error({"x": torch.tensor([4.0, -7.0]), "y": torch.tensor([0.5])}, right) == 0.125
    assert error({"x": right["x"]}, right) == float("inf")
    assert error({"x": right["x"], "y": torch.tensor([float("nan")])}, right) == float("inf")


def test_shares_of_a_trace() -> None:
    """Nested ranges must not count time twice. A matmul counts for the site whose transfer is in flight."""
    spans = [
        Span("aten::mm", 0, 1000),
        Span("overlap_inductor::exchange_start a", 1000, 1100),
        Span("aten::mm", 1200, 2200),
        Span("overlap_inductor::exchange_send a", 2200, 2300),
        Span("overlap_inductor::exchange_send", 2210, 2290),
        Span("overlap_inductor::exchange_wait a", 3000, 5000),
        Span("gloo:recv", 3100, 4000),
        Span("overlap_inductor::matmul_all_gather b", 5000, 6000),
        Span("aten::mm", 5100, 5900),
        Span("_c10d_functional::wait_tensor", 6000, 6500),
    ]
    found = shares(spans)
    assert found["a"] == {
        "send": pytest.approx(0.2), "sends": 2, "matmul": 1.0, "matmuls": 1, "wait": 2.0, "waits": 1, "span": 4.0,
    }  # fmt: skip
    assert found["b"] == {"loop": 1.0, "loops": 1, "span": 1.0}
    assert found[OUTSIDE] == {"matmul": 1.0, "matmuls": 1, "collective": 0.5, "collectives": 1}
    assert bars(spans) == [
        ("matmul", 0.0, 1.0), ("send", 1.0, 1.1), ("matmul", 1.2, 2.2), ("send", 2.2, 2.3), ("wait", 3.0, 5.0),
        ("loop", 5.0, 6.0), ("collective", 6.0, 6.5),
    ]  # fmt: skip


def test_bars_of_one_kind_are_joined() -> None:
    spans = [Span("aten::mm", b, b + 1000) for b in (0, 1100, 2500)]
    assert bars(spans) == [("matmul", 0.0, 2.1), ("matmul", 2.5, 3.5)]


def test_the_lanes_of_a_layer_on_gpus() -> None:
    """The middle layer of three goes from the second attention to the third. Copies are a lane of their own."""
    spans = [
        Span("sdpa_flash_fprop", 0, 500),
        Span("nvjet_sm90", 500, 900),
        Span("ncclDevKernel_AllReduce", 900, 1100),
        Span("sdpa_flash_fprop", 1000, 1500),
        Span("nvjet_sm90", 1500, 1700),
        Span("Memcpy PtoP (Device -> Device)", 1600, 1800),
        Span("wait_for_parts", 1700, 1750),
        Span("sum_partials", 1750, 1800),
        Span("all_gather_matmul", 1801, 2100),
        Span("sdpa_flash_fprop", 2000, 2500),
    ]
    begin, end = layer_trace_gpu.middle_layer(spans)
    assert (begin, end) == (1000, 2000)
    assert layer_trace_gpu.lanes(spans, begin, end) == {
        "kernels": [
            ("attention", 0.0, 0.5), ("matmul", 0.5, 0.7), ("wait", 0.7, 0.75), ("pointwise", 0.75, 0.8),
            ("matmul", 0.801, 1.0),
        ],
        "transfers": [("collective", 0.0, 0.1), ("send", 0.6, 0.8)],
    }  # fmt: skip
    with pytest.raises(ValueError, match="has 1 attentions"):
        layer_trace_gpu.middle_layer(spans[:3])


def test_the_table_has_what_was_measured() -> None:
    sites = {"inference matmul_all_reduce: ring": 4, "inference matmul_all_gather: keep": 1}
    text = tables.layers([row(PLAIN, 700.0), row("ring", 500.0, sites=sites)])
    assert (
        "| 2 | 500 Mbit/s | 2 | forward | 1024 | ring | 500.0 | 450.0-550.0 | 1.40 | 400.0 | 2048 | 512 | 12 | 2 |"
        in text
    )
    assert "| 1 all_gather, 5 all_reduce | - | 4 of 5 |" in text


def test_the_picture_keeps_its_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib comes with the bench extra")
    from PIL import Image

    found = [row(PLAIN, 700.0), row("ring", 500.0), row(LOCAL, 400.0), row(PLAIN, 900.0, phase="training")]
    plots.layers(found, tmp_path / "layers.png")
    with Image.open(tmp_path / "layers.png") as image:
        assert json.loads(image.info["Description"]) == found
