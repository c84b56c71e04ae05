# SPDX-License-Identifier: Apache-2.0
"""Makes short markdown tables of stored rows, for ``docs/performance.md``, one for each function in ``TABLES``."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from bench import rows
from bench import tables
from bench.tables import groups
from bench.tables import header
from bench.tables import line

Row = dict[str, Any]
NOT_SCHEDULES = ("keep", "auto", "async_tp")
"""Providers of ``bench.operators`` that a table never names as the best schedule."""


def _read(name: str) -> list[Row]:
    return [json.loads(text) for text in (rows.RESULTS / f"{name}.jsonl").read_text().splitlines()]


def _operators(**values: Any) -> list[Row]:
    """The stored rows of ``bench.operators`` whose fields have the given ``values``. Rows whose parameters were set by
    ``--set`` are left out."""
    found = tables.as_planned(rows.read(rows.RESULTS / "operators.jsonl"))
    return [row for row in found if all(row[name] == value for name, value in values.items())]


def _table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    return "\n".join([*header(*head), *(line(*cells) for cells in lines)])


def _speedup(row: Row | None) -> str:
    return "-" if row is None else f"{row['speedup']:.2f}"


def _best(of: dict[str, Row]) -> Row | None:
    return max((r for name, r in of.items() if name not in NOT_SCHEDULES), key=lambda r: r["speedup"], default=None)


PATTERNS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_gather")


def nvlink() -> str:
    """llama3-70b's MLP in bf16: for each number of GPUs, a table by pattern and tokens."""
    found = [
        row
        for row in _operators(shape="llama3-70b-mlp", dtype="bfloat16")
        if row["tokens"] >= 1024 and row["pattern"] in PATTERNS and "H200" in row["gpu"]
    ]
    found.sort(key=lambda r: (-r["world_size"], PATTERNS.index(r["pattern"]), r["tokens"]))
    parts = []
    for (ranks,), members in groups(found, "world_size").items():
        lines = [_nvlink_line(*case, same) for case, same in groups(members, "pattern", "tokens").items()]
        head = ("pattern", "tokens", "`keep` us", "async TP us", "best schedule", "best us", "best: speed-up",
                "`auto`: speed-up", "bound us", "best / bound", "best, in the loop", "`auto`, in the loop",
                "async TP, in the loop")  # fmt: skip
        parts.append(f"**{ranks} x H200**\n\n{_table(head, [line for line in lines if line])}")
    return "\n\n".join(parts)


def _nvlink_line(pattern: str, tokens: int, same: list[Row]) -> list[Any]:
    """A line of ``nvlink``; empty if no schedule was measured with the host hidden."""
    hidden = {r["provider"]: r for r in same if r["setting"] == "hidden"}
    looped = {r["provider"]: r for r in same if r["setting"] == "compiled"}
    best = _best(hidden)
    if best is None:
        return []
    async_tp = f"{hidden['async_tp']['median_us']:.0f}" if "async_tp" in hidden else "-"
    times = [f"{hidden['keep']['median_us']:.0f}", async_tp, best["runs"], f"{best['median_us']:.0f}"]
    ratios = [_speedup(best), _speedup(hidden.get("auto")), f"{best['bound_us']:.0f}", f"{best['ratio']:.2f}"]
    loop = [_speedup(row) for row in (_best(looped), looped.get("auto"), looped.get("async_tp"))]
    return [pattern, tokens, *times, *ratios, *loop]


HEADLINE = {"world_size": 8, "shape": "llama3-70b-mlp", "dtype": "bfloat16", "setting": "hidden"}
"""The case of README's picture: the largest group that was measured, the host hidden."""


def headline_rows() -> list[Row]:
    """The speed-ups of ``auto`` and async TP over ``keep``, and their limit, by pattern and tokens (at least 1024).

    ``limit``: the speed-up if the shorter of matmul and collective were wholly hidden. ``async_tp`` is ``None`` if
    async TP was not measured, for example because it has no op for the pattern.
    """
    found = []
    for (pattern, tokens), same in groups(_operators(**HEADLINE), "pattern", "tokens").items():
        of = {row["provider"]: row for row in same}
        if "auto" in of and tokens >= 1024:
            keep, async_tp = of["keep"], of.get("async_tp")
            found.append({
                "pattern": pattern,
                "tokens": tokens,
                "auto": of["auto"]["speedup"],
                "async_tp": None if async_tp is None else async_tp["speedup"],
                "limit": keep["median_us"] / keep["bound_us"],
            })  # fmt: skip
    return sorted(found, key=lambda r: (PATTERNS.index(r["pattern"]), r["tokens"]))


def headline() -> str:
    lines = [
        [r["pattern"], r["tokens"], f"{r['auto']:.2f}", _or_none(r["async_tp"]), f"{r['limit']:.2f}"]
        for r in headline_rows()
    ]
    return _table(("pattern", "tokens", "overlap_inductor", "PyTorch async TP", "limit"), lines)


def _or_none(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def other_shapes() -> str:
    """Speed-up of ``auto`` on 2 GPUs for every shape but llama3-70b's MLP, by tokens."""
    found = [
        row
        for row in _operators(world_size=2, dtype="bfloat16", setting="hidden", provider="auto")
        if row["shape"] != "llama3-70b-mlp"
    ]
    return _by_tokens(found, ("shape", "pattern"), lambda row: f"{row['speedup']:.2f} {row['runs']}")


def fp8() -> str:
    """Speed-ups over ``keep`` for fp8 on 2 GPUs, by tokens: ``auto`` and ``chunked/copy_engine``."""
    found = [
        row
        for dtype in ("fp8", "fp8_rows")
        for row in _operators(world_size=2, dtype=dtype, setting="hidden")
        if row["provider"] in ("chunked/copy_engine", "auto")
    ]
    return _by_tokens(found, ("dtype", "pattern", "provider"), lambda row: f"{row['speedup']:.2f}")


def without_peers() -> str:
    """Schedules ``wave_groups`` and ``ring`` on 2 GPUs without peer access (``NCCL_P2P_DISABLE=1``), by tokens."""
    found = [row for row in _read("operators_without_peers") if row["provider"] != "keep"]
    return _by_tokens(found, ("pattern", "provider"), lambda row: f"{row['median_us']:.0f} ({row['speedup']:.2f})")


def _by_tokens(found: list[Row], keys: tuple[str, ...], cell: Callable[[Row], str]) -> str:
    """A table with a line for each combination of values of ``keys`` and a column for each token count."""
    tokens = sorted({row["tokens"] for row in found})
    lines = []
    for values, same in groups(found, *keys).items():
        of = {row["tokens"]: cell(row) for row in same}
        lines.append([*values, *(of.get(count, "-") for count in tokens)])
    return _table([*keys, *(f"{count} tokens" for count in tokens)], lines)


def small_message() -> str:
    """A matmul with all-reduce, residual and norm, in CUDA graphs: microseconds by GPUs and tokens, from the last
    run."""
    found = {
        (r["world_size"], r["tokens"], r["provider"]): r
        for r in _read("small_message")
        if r["provider"] in ("keep", "planned", "matmul")
    }
    lines = []
    for ranks, tokens in sorted({key[:2] for key in found}):
        keep, planned, matmul = (found[ranks, tokens, name] for name in ("keep", "planned", "matmul"))
        times = [f"{r['graph_us']:.1f}" for r in (matmul, keep, planned)]
        lines.append([ranks, tokens, *times, f"{planned['graph_speedup']:.2f}"])
    return _table(("GPUs", "tokens", "matmul alone us", "`keep` us", "`small_message` us", "speed-up"), lines)


def models() -> str:
    """An unchanged Hugging Face Llama, by the model whose layer sizes it has, GPUs and tokens. Each stored run has a
    line."""
    lines = []
    for row in _read("models"):
        sites = ", ".join(f"{count} {name}" for name, count in row["sites"].items())
        what = "one token, CUDA graphs" if row["cudagraphs"] else f"prefill of {row['tokens']}"
        cells = [row.get("layer", "llama3-70b"), row["world_size"], what, row["batch"], f"{row['ms']['plain']:.2f}"]
        before = f"{row['speedup before']:.2f}" if "speedup before" in row else "-"
        lines.append([*cells, f"{row['ms']['auto']:.2f}", f"{row['speedup']:.2f}", before, sites])
    head = (
        "layers of",
        "GPUs",
        "what",
        "sequences",
        "plain ms",
        "`auto` ms",
        "speed-up",
        "before",
        "sites and their schedules",
    )
    return _table(head, lines)


def training() -> str:
    """Training steps of two sequence-parallel blocks on 2 GPUs. Each stored run has a line."""
    lines = [
        [row["hidden"], row["tokens"], row["provider"], f"{row['ms']:.1f}", f"{row['speedup']:.2f}", row["note"]]
        for row in _read("training")
    ]
    return _table(("hidden", "tokens", "provider", "ms", "speed-up", "run"), lines)


def handed_out() -> str:
    """Microseconds of a site whose gathered tensor is also read outside the site, on 2 GPUs."""
    return _by_tokens(_read("handed_out"), ("provider",), lambda row: f"{row['us']:.0f}")


def ring_nccl() -> str:
    """The ring over NCCL's send and receive: microseconds, and speed-ups of the fastest and slowest number of
    sub-chunks."""
    lines = []
    for row in _read("ring_nccl"):
        rings = {name: us for name, us in row.items() if name.startswith("ring S=")}
        name, us = min(rings.items(), key=lambda pair: pair[1])
        cells = [row["world_size"], row["pattern"], row["tokens"], f"{row['keep']:.0f}", name[5:], f"{us:.0f}"]
        worst = row["keep"] / max(rings.values())
        lines.append([*cells, f"{row['keep'] / us:.2f}", f"{worst:.2f}"])
    head = (
        "GPUs",
        "pattern",
        "tokens",
        "`keep` us",
        "fastest S",
        "fastest us",
        "fastest: speed-up",
        "slowest: speed-up",
    )
    return _table(head, lines)


def turns() -> str:
    """GB/s of copy engines with and without turns, by the size of a piece, if each of 8 GPUs sends to all others."""
    found = {
        (r["rounds"], r["megabytes"], r["provider"]): r["gb_per_s"]
        for r in _read("turns")
        if r["kind"] == "alone" and r["world_size"] == 8 and r["provider"] in ("copy_engine", "copy_engine, in turn")
    }
    lines = []
    for rounds, size in sorted({key[:2] for key in found}, reverse=True):
        both = [found.get((rounds, size, name)) for name in ("copy_engine", "copy_engine, in turn")]
        lines.append([rounds, size, *("-" if rate is None else f"{rate:.0f}" for rate in both)])
    return _table(("pieces that a rank sends", "MiB of a piece", "GB/s without turns", "GB/s with turns"), lines)


def compile_cost() -> str:
    """CPU time to compile a Llama. Each stored run has a line. Brackets hold the ratio of this time to that of the
    plain compile in the same run."""
    lines, plain = [], {}
    for row in _read("compile_cost"):
        both = [row["seconds"], row["seconds"] + row["compiler_seconds"]]
        run = (row["phase"], row["layers"], row.get("commit"), row["cpu"])
        if row["setting"] == "plain":
            plain[run] = both
        cells = [f"{s:.1f} ({s / base:.2f})" for s, base in zip(both, plain[run], strict=True)]
        lines.append(
            [row["phase"], row["layers"], row["setting"], row["cpu"], row["date"], *cells, f"{row['pass_seconds']:.2f}"]
        )
    times = ("without the C++ compiler s", "with the C++ compiler s", "the pass s")
    head = ("phase", "layers", "setting", "CPU", "date", *times)
    return _table(head, lines)


def host() -> str:
    """Host time of one call, from the last run of each case."""
    lines = {}
    for row in _read("host"):
        for pattern, found in row["found"].items():
            cells = [f"{found[name]:.0f}" for name in ("op", row["schedule"], "keep")]
            lines[row["world_size"], row["schedule"], pattern] = [
                *cells,
                f"{found['replayed']:.0f}" if "replayed" in found else "-",
                f"{found['torch.empty']:.1f}" if "torch.empty" in found else "-",
            ]
    head = (
        "GPUs",
        "schedule",
        "pattern",
        "op us",
        "graph with the op us",
        "plain graph us",
        "replayed us",
        "`torch.empty` us",
    )
    return _table(head, [[*case, *cells] for case, cells in lines.items()])


def agreement() -> str:
    """Host time that one call needs to compare plans, from the last run for each number of ranks."""
    last = {row["ranks"]: row for row in _read("agreement")}
    lines = [
        [ranks, *(f"{row[k]:.1f}" if k in row else "-" for k in ("own", "together", "uneven")), f"{row['store']:.0f}"]
        for ranks, row in sorted(last.items())
    ]
    return _table(("ranks", "own share us", "all together us", "uneven us", "over the store us"), lines)


def slow_link_rows() -> list[Row]:
    return _read("slow_link")


def slow_link() -> str:
    return tables.slow_link(slow_link_rows()).strip()


def layers_rows(name: str = "layers_slow_link") -> list[Row]:
    """The stored rows of ``bench.layers``, from the last run of each program on each link. ``name``: the file's name,
    without its suffix."""
    program = ("ranks", "link", "layers", "phase", "batch", "tokens")
    return [row for same in groups(_read(name), *program).values() for row in same if row["date"] == same[-1]["date"]]


def drawn_layers_rows() -> list[Row]:
    """The rows of ``layers_rows`` that are drawn: models of 4 layers on the machine of two cores."""
    return [row for row in layers_rows() if row["layers"] == 4 and row["cores"] == 2]


FAMILY_RANKS = (2, 3, 4)


def families() -> str:
    """The Hugging Face families that were trained with the sequence-parallel rewrite: each with its result, how many of
    its all-reduces were rewritten, and why the others were not."""
    stored = _read("hugging_face_rewritten") + _read("hugging_face_rewritten_ranks")
    lines = []
    for (family,), same in groups(stored, "case").items():
        of = {row["ranks"]: row for row in same}
        outcomes = {row["outcome"] for row in of.values()}
        result = outcomes.pop() if len(outcomes) == 1 else ", ".join(f"{n}: {row['outcome']}" for n, row in of.items())
        counts = [
            f"{row['rewritten']} of {row['all_reduces']}" if "all_reduces" in row else "-"
            for row in (of.get(number, {}) for number in FAMILY_RANKS)
        ]
        left = {reason.removeprefix("refused: ") for row in of.values() for reason in row.get("left", {})}
        lines.append((family, result, *counts, ", ".join(sorted(left)) or "-"))
    return _table(("family", "result", *(f"{n} ranks" for n in FAMILY_RANKS), "reason of the others"), lines)


def trace_rows() -> list[Row]:
    return _read("layer_trace")


def gpu_trace_rows() -> list[Row]:
    return _read("layer_trace_gpu")


def layers() -> str:
    return tables.layers(layers_rows()).strip()


def layers_on_gpus() -> str:
    return tables.layers(layers_rows("layers")).strip()


EXCHANGES = ("matmul_all_to_all", "all_to_all_matmul")


def exchanges() -> str:
    """llama3-70b's MLP in bf16 beside all-to-alls: times with the host hidden, and the overlap efficiency."""
    found = [row for row in _operators(setting="hidden", dtype="bfloat16") if row["pattern"] in EXCHANGES]
    lines = []
    for case, same in groups(found, "gpu", "world_size", "pattern", "tokens").items():
        gpu, ranks, pattern, tokens = case
        of = {row["provider"]: row for row in same}
        best, auto = _best(of), of.get("auto")
        if best is None or auto is None:
            continue
        kept = of["keep"]
        lines.append(
            [
                f"{ranks} x {_short(gpu)}",
                pattern,
                tokens,
                *(f"{kept[k]:.0f}" for k in ("matmul_us", "collective_us", "median_us")),
                f"`{best['provider']}`",
                f"{best['median_us']:.0f}",
                _speedup(best),
                f"{best['efficiency']:.2f}",
                _speedup(auto),
            ]
        )
    lines.sort(key=lambda cells: (cells[0], EXCHANGES.index(cells[1]), cells[2]))
    head = ("GPUs", "pattern", "tokens", "matmul us", "all-to-all us", "`keep` us", "best schedule", "best us",
            "best: speed-up", "best: efficiency", "`auto`: speed-up")  # fmt: skip
    return _table(head, lines)


def lookups() -> str:
    """Lookups in embedding tables and an all-to-all: the last run of each case."""
    lines = {}
    for row in _read("lookups"):
        case = (
            f"{row['world_size']} x {_short(row['gpu'])}",
            row["tables"],
            row["batch"],
            row["width"],
            row["pooling"],
        )
        alone, loop = ({n: t["median"] for n, t in row["us"][setting].items()} for setting in ("hidden", "compiled"))
        cells = [f"{alone[name]:.0f}" for name in ("lookups", "exchange", "keep", "fused")]
        lines[case] = [*case, *cells, *(f"{us['keep'] / us['fused']:.2f}" for us in (alone, loop))]
    head = ("GPUs", "tables", "bags", "width", "indices of a bag", "lookups us", "all-to-all us", "`keep` us",
            "`fused` us", "speed-up", "speed-up, in the loop")  # fmt: skip
    return _table(head, [lines[case] for case in sorted(lines)])


def experts() -> str:
    """Layers of experts on GPUs, with the host in the loop: the last run of each provider."""
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in _read("experts"):
        case = (f"{row['world_size']} x {_short(row['gpu'])}", row["layer"], row["form"], row["tokens"])
        us = {name: timing["median"] for name, timing in row["us"]["compiled"].items()}
        known = lines.setdefault(case, {})
        known |= {name: f"{us[name]:.0f}" for name in ("transfers", "keep")}
        known |= {name: f"{us['keep'] / us[name]:.2f}" for name in ("chunked", "ring", "auto") if name in us}
    head = ("GPUs", "layer", "form", "tokens", "transfers us", "`keep` us", "`chunked`: speed-up", "`ring`: speed-up",
            "`auto`: speed-up")  # fmt: skip
    shown = ("transfers", "keep", "chunked", "ring", "auto")
    return _table(head, [[*case, *(lines[case].get(name, "-") for name in shown)] for case in sorted(lines)])


def _short(gpu: str) -> str:
    """``H100`` for ``NVIDIA H100 80GB HBM3``."""
    return gpu.removeprefix("NVIDIA ").split()[0]


TABLES: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (
        headline, nvlink, other_shapes, fp8, without_peers, small_message, models, training, handed_out, ring_nccl,
        turns, compile_cost, host, agreement, slow_link, layers, layers_on_gpus, exchanges, lookups, experts,
        families,
    )
}  # fmt: skip
