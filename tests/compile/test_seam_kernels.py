# SPDX-License-Identifier: Apache-2.0
"""The kernels that Inductor generates for a seam in bands. The bands of a seam share kernels, so further bands add no
work for the C++ compiler. A band's kernel reads the band's rows through a pointer to the first of them. These rows are
a *window* of the whole tensor (``inductor.window``)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from overlap_inductor.inductor.lowerings import register_lowerings
from overlap_inductor.lowerings.ring import unrolled_bands
from overlap_inductor.switch.install import install_hooks
from overlap_inductor.torch_compat.functional_collectives import all_gather
from overlap_inductor.torch_compat.functional_collectives import reduce_scatter
from tests.support.fake_group import fake_group
from tests.support.generated_code import code_of
from tests.support.generated_code import lines_of

ROWS, FEATURES = 32, 64


def world() -> Any:
    return dist.group.WORLD


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _two_seams(a: torch.Tensor, residual: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """A residual and a norm stand between a first matmul and a gated MLP, and again between the MLP and a last matmul.
    Each rank holds ``ROWS`` rows of the residual."""
    project, gate, up, down, head = weights
    rows = residual + reduce_scatter(a @ project, "sum", 0, world())
    gathered = all_gather(_norm(rows), 0, world())
    inner = F.silu(gathered @ gate) * (gathered @ up)
    rows = rows + reduce_scatter(inner @ down, "sum", 0, world())
    return all_gather(_norm(rows), 0, world()) @ head


def _lines(bands: int, world_size: int) -> list[str]:
    square = (FEATURES, FEATURES)
    shapes = (world_size * ROWS, FEATURES), (ROWS, FEATURES), square, square, square, square, square
    return lines_of(_two_seams, *shapes, world_size=world_size, rank=1, sub_chunks=bands)


def _calls(bands: int, world_size: int) -> Counter[str]:
    """How often the generated code calls each kernel, by the kernel's name."""
    lines = _lines(bands, world_size)
    sends = [line for line in lines if "exchange_send" in line and "'broadcast'" in line]
    assert len(sends) == 2 * bands
    return Counter(re.findall(r"(cpp_fused\w*)\(", "\n".join(lines)))


@pytest.mark.usefixtures("alone")
def test_bands_share_kernels() -> None:
    """Each seam has one kernel, which computes the sum and the norm of a band. It is called once for each band. The
    activation has one kernel, called for each piece but one of this rank's rows. These rows are multiplied again
    together, so their pieces are joined; the kernel of the first one writes the joined rows from their beginning. The
    seams' kernels differ, because the sum of the second seam is not read again."""
    for bands in (2, 4):
        assert sorted(_calls(bands, 2).values()) == [1, bands, bands, 2 * bands - 1]


@pytest.mark.usefixtures("alone")
def test_bands_of_four_ranks_share_kernels() -> None:
    """The number of kernels does not depend on the number of bands. Four ranks have more kernels than two ranks, for
    two reasons. The activation has one kernel for this rank's rows, and one for other ranks' rows. And in the second
    seam, the first band's kernel differs from that of the other bands."""
    few, many = _calls(2, 4), _calls(8, 4)
    assert len(few) == len(many) == 5, (few, many)


@pytest.mark.usefixtures("alone")
def test_one_matmul_multiplies_a_band_of_all_other_ranks() -> None:
    """Before the scatter, each seam has one matmul for each band of the three other ranks' rows. One more matmul
    computes all of this rank's own rows. Each matmul behind the gather is called twice a band: for this rank's rows,
    and for the other ranks' rows."""
    bands = 4
    scatters, behind_gathers = 2 * (bands + 1), 3 * 2 * bands
    calls = [line for line in _lines(bands, 4) if "extern_kernels.mm(" in line]
    assert len(calls) == scatters + behind_gathers


@pytest.mark.usefixtures("alone")
def test_large_bands_are_multiplied_one_by_one_or_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three other ranks are three groups with one rank each, or two groups: one with two ranks, one with one
    rank."""
    bands = 4
    for ranks_together, matmuls in ((1, 3), (2, 2)):
        monkeypatch.setattr(unrolled_bands, "JOINED_ROWS", ranks_together * ROWS // bands)
        calls = [line for line in _lines(bands, 4) if "extern_kernels.mm(" in line]
        assert len(calls) == 2 * (matmuls * bands + 1) + 3 * (matmuls + 1) * bands


@pytest.mark.usefixtures("alone")
def test_each_band_is_summed_and_normed_by_one_kernel() -> None:
    """In the first seam, the kernel of a band stands between the wait for the band and the send of the band's norm. The
    second seam reads the band's sum again. The kernel stores the sum, so no later kernel adds the partial sums
    again."""
    lines = lines_of(
        _two_seams,
        (2 * ROWS, FEATURES),
        (ROWS, FEATURES),
        *[(FEATURES, FEATURES)] * 5,
        world_size=2,
        rank=1,
        sub_chunks=2,
    )
    marks = {"exchange_wait": "wait", "exchange_send": "send", "cpp_fused": "kernel", "extern_kernels.mm": "mm"}
    seen = [event for line in lines for mark, event in marks.items() if mark in line and not line.startswith("#")]
    first = seen.index("wait")
    band = ["wait", "kernel", "send", "mm", "mm", "kernel"]
    assert seen[first : first + 2 * len(band)] == band * 2


def _windows(tensor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
    """The generated code of matmuls that read the sines of two windows of ``tensor(x, w)``, which is ``[16, 8]``. The
    first matmul keeps Inductor from computing both sines in one kernel call."""

    def both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        whole = tensor(x, w)
        first, last = (torch.ops.overlap_inductor.window.default(whole, 0, start, 4) for start in (4, 12))
        return last.sin() @ (first.sin() @ w).t()

    register_lowerings()
    install_hooks()
    with fake_group(2), torch.no_grad():
        return code_of(torch.compile(both), torch.randn(16, 8), torch.randn(8, 8))


def _read_late(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``product`` is read only through windows, and only after ``other`` has been computed. ``other`` is as large as
    ``product``."""
    window = torch.ops.overlap_inductor.window.default
    product = x @ w
    first, last = (window(product, 0, start, 4) for start in (4, 12))
    other = y @ w
    return first.sin() + other[:4], last.cos() + other[4:8]


def test_the_memory_of_a_tensor_lives_as_long_as_its_windows() -> None:
    """The generated code runs and computes what eager PyTorch computes."""
    register_lowerings()
    install_hooks()
    torch.manual_seed(0)
    x, y, w = torch.randn(16, 8), torch.randn(16, 8), torch.randn(8, 8)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        found = torch.compile(_read_late)(x, y, w)
    for a, b in zip(found, _read_late(x, y, w), strict=True):
        torch.testing.assert_close(a, b)


def test_two_windows_are_one_kernel_and_no_copy() -> None:
    """One kernel, called twice, computes the sines of both windows. The kernel's caller passes views of the rows."""
    code = _windows(lambda x, w: x @ w)
    assert re.findall(r"reinterpret_tensor\(buf0, \(4, 8\), \(8, 1\), (\d+)\)", code) == ["96", "32"]
    assert code.count("async_compile.cpp_pybinding(") == 1


def test_what_two_results_compute_is_stored_for_its_windows() -> None:
    """An elementwise result of two other results is stored once, and read through windows. The stored result can take
    the memory of one of the two. If the result is computed from the graph's inputs, it is not stored, because it would
    need new memory."""
    stored = _windows(lambda x, w: (x @ w).sin() + (x @ w.t()).cos())
    assert stored.count(", (4, 8), (8, 1), 32)") == stored.count(", (4, 8), (8, 1), 96)") == 1
    computed = _windows(lambda x, w: x.sin() + x.cos())
    assert ", (4, 8), (8, 1), 32)" not in computed
