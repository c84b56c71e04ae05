# SPDX-License-Identifier: Apache-2.0
"""The operator bench without ranks: its clock, its rows and tables, and its command line."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import plots
from bench import report
from bench import rows
from bench import tables
from bench.operators import cases
from bench.operators import parsed
from bench.providers import Provider
from bench.providers import Variant
from bench.providers import chosen
from bench.providers import provider_names
from bench.providers import request
from bench.providers import why_not
from bench.shapes import SHAPES
from bench.shapes import Case
from bench.timing import CYCLES_A_MS
from bench.timing import Clock
from bench.timing import Timing
from overlap_inductor.torch_compat import symmetric

CPU = torch.device("cpu")
WHERE = {"gpu": "NVIDIA H200", "torch": "2.11.0"}


class Gpu:
    """Takes the place of CUDA: a host and a device with a queue, in simulated time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.device = 0.0
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = max(gpu.host, gpu.device)

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.call(0.0, cycles / CYCLES_A_MS * 1e-3))
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(dist, "barrier", self.synchronize)
        monkeypatch.setattr(dist, "all_reduce", lambda tensor: self.call(10e-6, 20e-6))
        monkeypatch.setattr(time, "perf_counter", lambda: self.host)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)

    def call(self, host: float, device: float) -> None:
        self.host += host
        self.device = max(self.host, self.device) + device


@pytest.mark.parametrize(("host", "device"), [(800e-6, 200e-6), (50e-6, 900e-6)])
def test_the_clock_hides_the_host_only_behind_a_sleep(
    monkeypatch: pytest.MonkeyPatch, host: float, device: float
) -> None:
    gpu, clock = Gpu(monkeypatch), Clock(CPU)
    clock.device = torch.device("cuda")
    hidden = clock.sample(lambda: gpu.call(host, device), 1, 3.0)
    assert hidden == pytest.approx((device * 1e6, host * 1e6))
    in_loop = clock.sample(lambda: gpu.call(host, device), 4, 0.0)
    # The clock first makes one uncounted call, which fills the pipeline. So host and device overlap in each counted
    # call, and a call takes the longer of their times.
    assert in_loop == pytest.approx((max(host, device) * 1e6, host * 1e6))


def case(
    pattern: str = "all_gather_matmul", tokens: int = 4096, shape: str = "llama3-70b-mlp", operands: str = "bfloat16"
) -> Case:
    return Case(shape, pattern, tokens, 4, operands)


def some_rows(tokens: int = 4096, **times: float) -> list[dict[str, Any]]:
    times = {"keep": 790.0, "fused/sm_push": 640.0, "auto": 645.0, **times}
    providers = [
        Provider(name, torch.empty, "fused" if name == "auto" else name.split("/")[0], {}, 3 << 20) for name in times
    ]
    measured = {
        name: Timing(us, us - 5, us + 10, 21.5, 20)
        for name, us in {**times, "matmul": 600.0, "collective": 190.0}.items()
    }
    return rows.rows_of(
        case(tokens=tokens),
        "hidden",
        providers,
        measured,
        dict.fromkeys(times, 0.00325),
        dict.fromkeys(times, float(1 << 20)),
        WHERE,
    )


def test_a_row_has_its_bounds_and_the_figures_derived_from_them() -> None:
    row = some_rows()[1]
    expected = {
        "shape": "llama3-70b-mlp", "pattern": "all_gather_matmul", "world_size": 4, "tokens": 4096,
        "dtype": "bfloat16", "setting": "hidden", "provider": "fused/sm_push", "runs": "fused",
        "median_us": 640.0, "p20_us": 635.0, "p80_us": 650.0, "speedup": 1.234,
        "matmul_us": 600.0, "collective_us": 190.0, "sum_us": 790.0, "bound_us": 600.0,
        "ratio": 1.067, "efficiency": 0.789,
        "host_us": 21.5, "peak_extra_bytes": 4 << 20, "error": 0.00325, "repeats": 20, "parameters": {}, **WHERE,
    }  # fmt: skip
    assert row == expected


def test_tables_show_all_providers_and_mark_the_best() -> None:
    text = tables.operators([*some_rows(), *some_rows(1024, **{"keep": 600.0, "ring/p2p": 900.0})], details=True)
    overview, details = text.split("\n\n")[1:]
    assert text.startswith("**4 x NVIDIA H200, llama3-70b-mlp, bfloat16, the host hidden**\n\n")
    assert overview.splitlines() == [
        (
            "| pattern | tokens | matmul | collective | sum | max | keep | fused/sm_push | auto | ring/p2p | best |"
            " speed-up | ratio | efficiency |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        (
            "| all_gather_matmul | 1024 | 600 | 190 | 790 | 600 | 600 | **640 (0.94)** | 645 (0.93, fused) | 900 (0.67)"
            " | fused/sm_push | 0.94 | 1.07 | 0.79 |"
        ),
        (
            "| all_gather_matmul | 4096 | 600 | 190 | 790 | 600 | 790 | **640 (1.23)** | 645 (1.23, fused) | - |"
            " fused/sm_push | 1.23 | 1.07 | 0.79 |"
        ),
    ]
    assert (
        details.splitlines()[5]
        == "| all_gather_matmul | 1024 | ring/p2p | 900.0 | 895.0 | 910.0 | 0.67 | 1.50 | -0.58 | 22 | 4.0 |"
    )


def test_other_parameters_are_in_the_details_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = some_rows(**{"fused parts=2": 500.0})
    overview, details = tables.operators(found, details=True).split("\n\n")[1:]
    assert (
        "parts=2" not in overview and "| fused/sm_push | 1.23 |" in overview and "| fused parts=2 | 500.0 |" in details
    )
    drawn: list[str] = []
    monkeypatch.setattr(
        plots, "_against_tokens", lambda rows, figure, folder: drawn.extend(row["provider"] for row in rows) or folder
    )
    plots.operators(found, tmp_path)
    assert set(drawn) == {"keep", "fused/sm_push", "auto"}


def test_the_last_row_of_a_provider_counts_and_older_forms_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows.append(path, some_rows())
    rows.append(path, [{"pattern": "all_gather_matmul", "tokens": 4096, "provider": "keep", "us": 791.2}])
    rows.append(path, some_rows(auto=500.0))
    assert {row["provider"]: row["median_us"] for row in rows.read(path)} == {
        "keep": 790.0,
        "fused/sm_push": 640.0,
        "auto": 500.0,
    }
    assert len(path.read_text().splitlines()) == 7


def test_the_report_draws_the_pages_pictures_from_the_default_rows_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The path of the default rows may be relative."""
    drawn: list[Path] = []
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(plots, "operators", lambda found, folder: [])
    monkeypatch.setattr(report, "PICTURES", {picture: (list, lambda found, path: drawn.append(path))})
    monkeypatch.chdir(rows.RESULTS)
    copy = shutil.copy("operators.jsonl", tmp_path)
    report.main(["--rows", copy, "--out", str(tmp_path)])
    assert drawn == []
    report.main(["--rows", "operators.jsonl", "--out", str(tmp_path)])
    assert drawn == [picture]


def test_rows_say_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_VERSION", "2.28.3-1")
    monkeypatch.setenv("OVERLAP_INDUCTOR", "1")
    found = rows.environment(CPU)
    assert {"gpu", "torch", "triton", "nccl", "driver", "commit", "sources", "variables", "date"} == set(found)
    assert (
        found["variables"]["NCCL_P2P_DISABLE"] == "1"
        and found["variables"]["OVERLAP_INDUCTOR"] == "1"
        and "NCCL_VERSION" not in found["variables"]
    )
    json.dumps(found)


def test_parameters_are_read_and_unknown_ones_are_refused_by_name() -> None:
    assert Variant.parse("fused.parts=2,pushers=8") == Variant("fused", "parts=2,pushers=8", {"parts": 2, "pushers": 8})
    assert Variant.parse("chunked.transport=sm_push").parameters == {"transport": "sm_push"}
    assert Variant.parse("wave_groups.free=[8, 16],halves=false").parameters == {"free": [8, 16], "halves": False}
    with pytest.raises(
        ValueError, match="'bands=2' sets no parameter of schedule fused; expected one of blocks, copies_from, parts"
    ):
        Variant.parse("fused.parts=2,bands=2")
    with pytest.raises(ValueError, match="no parameters of schedule 'ring' can be set"):
        Variant.parse("ring.parts=2")
    with pytest.raises(SystemExit):
        parsed(["--set", "fused.nothing=1"])


def test_a_provider_that_cannot_run_is_left_out_with_its_reason() -> None:
    patterns = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
    arguments = parsed(["--tokens", "4", "1", "--set", "fused.parts=2", "--patterns", *patterns])
    everything = cases(arguments, 4)
    assert [c.tokens for c in everything] == [4, 4, 4, 1, 1, 1]
    assert [c.why_not() is None for c in everything] == [True, True, True, False, False, True]
    assert chosen(arguments.schedules, arguments.variants, case(), CPU) == ["keep", "ring/p2p", "auto"]
    assert chosen(["fused/sm_push"], [], case(), CPU) == ["keep"]
    assert "async TP has no op" in str(why_not("async_tp", case("matmul_all_reduce"), CPU))
    assert "too many for a small message" in str(why_not("small_message/sm_push", case("matmul_all_reduce"), CPU))
    assert "no signalling matmul computes all_gather_matmul" in str(why_not("wave_groups/nccl", case(), CPU))
    assert "the matrices are torch.float32" in str(why_not("fused parts=2", case(operands="float32"), CPU))


def test_fp8_is_multiplied_by_the_plain_graph_the_ring_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "why_no_symmetric_memory", lambda ranks, device: None)
    arguments = parsed(["--dtype", "fp8_rows"])
    made, *_ = cases(arguments, 4)
    assert (made.operands, made.dtype, made.result, made.sent) == (
        "fp8_rows",
        torch.float8_e4m3fn,
        torch.bfloat16,
        torch.float8_e4m3fn,
    )
    assert made.scale_shapes == ((16384, 1), (1, 7168))
    for pattern in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        made = case(pattern, operands="fp8")
        assert made.scale_shapes == ((), ())
        assert chosen(arguments.schedules, [], made, CPU) == [
            "keep",
            "ring/p2p",
            "chunked/copy_engine",
            "chunked/sm_push",
            "auto",
        ]
        left_out = {name: str(why_not(name, made, CPU)) for name in provider_names() if why_not(name, made, CPU)}
        assert set(left_out) == {
            "async_tp",
            "fused/sm_push",
            "fused/copy_engine",
            "wave_groups/nccl",
            "small_message/sm_push",
        }
        assert left_out["fused/sm_push"] == "no fused kernel multiplies fp8 with scales"
    # A gather sends fp8, and a reduction sends bf16.
    needs = [
        request(case(pattern, operands="fp8"), "chunked", "{}", "site")
        for pattern in ("all_gather_matmul", "matmul_reduce_scatter")
    ]
    assert [n and n.nbytes for n in needs] == [4096 * 8192, 2 * 4096 * 8192]


def test_every_named_layer_has_shards_that_kernels_support() -> None:
    assert provider_names()[0] == "keep" and len(set(provider_names())) == len(provider_names())
    for shape in SHAPES:
        for world_size in (2, 4, 8):
            for pattern in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
                made = Case(shape, pattern, 1024, world_size, "bfloat16")
                assert made.why_not() is None and made.inner % 8 == made.columns % 8 == 0
