"""fp8 sites (``_scaled_mm``) of schedule ``chunked``: the graph before and after, word for word."""

from __future__ import annotations

import re

import pytest
from expecttest import TestCase

from overlap_inductor.torch_compat import symmetric
from tests.compile.scaled_graphs import gather_site
from tests.compile.scaled_graphs import reduce_site
from tests.compile.scaled_graphs import scatter_site
from tests.fake_group import fake_group
from tests.hand_graph import HandGraph


@pytest.fixture(autouse=True)
def _reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs of one machine."""
    monkeypatch.setattr(symmetric, "why_no_symmetric_memory", lambda ranks, device: None)


def golden(made: HandGraph) -> str:
    report = made.run(schedule="chunked")
    return re.sub(r"plan [0-9a-f]{16}", "plan ...", f"before\n{report.before}after\n{report.after}")


class TestGolden(TestCase):
    """Before and after, word for word. Run with EXPECTTEST_ACCEPT=1 after an intended change, read the difference."""

    maxDiff = None

    def test_gather(self) -> None:
        """A gathered tensor that nobody reads, or a collective that is still there."""
        with fake_group(2):
            self.assertExpectedInline(
                golden(gather_site()),
                """\
before
x: float8_e4m3fn[32, 32] = input
all_gather_into_tensor_default: float8_e4m3fn[64, 32] = _c10d_functional.all_gather_into_tensor.default(x, 2, '0')
wait_tensor_default: float8_e4m3fn[64, 32] = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[] = input
scale_b: float32[] = input
_scaled_mm_default: bfloat16[64, 48] = aten._scaled_mm.default(wait_tensor_default, permute_default, scale_a, scale_b, \
None, None, torch.bfloat16)
return [_scaled_mm_default]
after
x: float8_e4m3fn[32, 32] = input
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[] = input
scale_b: float32[] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x, \
'[["all_gather_matmul-2698cce8", 2048, 1]]', 4096)
chunked_scaled_all_gather_matmul_default = overlap_inductor.chunked_scaled_all_gather_matmul.default(agree_default, x, \
[permute_default], [None], [scale_a], [scale_b], ['bfloat16'], [False], False, '{"bands": 1, "transport": "auto"}', \
'0', 'all_gather_matmul-2698cce8')
getitem = <built-in function getitem>(chunked_scaled_all_gather_matmul_default, 0)
getitem_2: bfloat16[64, 48] = <built-in function getitem>(getitem, 0)
return [getitem_2]
""",
            )
        with fake_group(8):
            self.assertExpectedInline(
                golden(gather_site(True)),
                """\
before
x: float8_e4m3fn[32, 32] = input
all_gather_into_tensor_default: float8_e4m3fn[256, 32] = _c10d_functional.all_gather_into_tensor.default(x, 8, '0')
wait_tensor_default: float8_e4m3fn[256, 32] = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[256, 1] = input
scale_b: float32[1, 48] = input
_scaled_mm_default: bfloat16[256, 48] = aten._scaled_mm.default(wait_tensor_default, permute_default, scale_a, \
scale_b, None, None, torch.bfloat16)
return [_scaled_mm_default]
after
x: float8_e4m3fn[32, 32] = input
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[256, 1] = input
scale_b: float32[1, 48] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x, \
'[["all_gather_matmul-2698cce8", 8192, 1]]', 4096)
chunked_scaled_all_gather_matmul_default = overlap_inductor.chunked_scaled_all_gather_matmul.default(agree_default, x, \
[permute_default], [None], [scale_a], [scale_b], ['bfloat16'], [False], False, '{"bands": 1, "transport": "auto"}', \
'0', 'all_gather_matmul-2698cce8')
getitem = <built-in function getitem>(chunked_scaled_all_gather_matmul_default, 0)
getitem_2: bfloat16[256, 48] = <built-in function getitem>(getitem, 0)
return [getitem_2]
""",
            )

    def test_scatter(self) -> None:
        with fake_group(2):
            self.assertExpectedInline(
                golden(scatter_site(True)),
                """\
before
x: float8_e4m3fn[64, 32] = input
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[64, 1] = input
scale_b: float32[1, 48] = input
_scaled_mm_default: bfloat16[64, 48] = aten._scaled_mm.default(x, permute_default, scale_a, scale_b, None, None, \
torch.bfloat16)
reduce_scatter_tensor_default: bfloat16[32, 48] = _c10d_functional.reduce_scatter_tensor.default(_scaled_mm_default, \
'sum', 2, '0')
wait_tensor_default: bfloat16[32, 48] = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_default)
return [wait_tensor_default]
after
x: float8_e4m3fn[64, 32] = input
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[64, 1] = input
scale_b: float32[1, 48] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x, \
'[["matmul_reduce_scatter-e597586f", 6144, 1]]', 4096)
chunked_scaled_matmul_reduce_scatter_default = \
overlap_inductor.chunked_scaled_matmul_reduce_scatter.default(agree_default, x, permute_default, None, scale_a, \
scale_b, 'bfloat16', False, '{"bands": 1, "transport": "auto"}', 'sum', '0', 'matmul_reduce_scatter-e597586f')
getitem: bfloat16[32, 48] = <built-in function getitem>(chunked_scaled_matmul_reduce_scatter_default, 0)
return [getitem]
""",
            )
        with fake_group(8):
            self.assertExpectedInline(
                golden(scatter_site()),
                """\
before
x: float8_e4m3fn[256, 32] = input
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[] = input
scale_b: float32[] = input
_scaled_mm_default: bfloat16[256, 48] = aten._scaled_mm.default(x, permute_default, scale_a, scale_b, None, None, \
torch.bfloat16)
reduce_scatter_tensor_default: bfloat16[32, 48] = _c10d_functional.reduce_scatter_tensor.default(_scaled_mm_default, \
'sum', 8, '0')
wait_tensor_default: bfloat16[32, 48] = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_default)
return [wait_tensor_default]
after
x: float8_e4m3fn[256, 32] = input
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[] = input
scale_b: float32[] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x, \
'[["matmul_reduce_scatter-e597586f", 24576, 1]]', 4096)
chunked_scaled_matmul_reduce_scatter_default = \
overlap_inductor.chunked_scaled_matmul_reduce_scatter.default(agree_default, x, permute_default, None, scale_a, \
scale_b, 'bfloat16', False, '{"bands": 1, "transport": "auto"}', 'sum', '0', 'matmul_reduce_scatter-e597586f')
getitem: bfloat16[32, 48] = <built-in function getitem>(chunked_scaled_matmul_reduce_scatter_default, 0)
return [getitem]
""",
            )

    def test_reduce(self) -> None:
        with fake_group(2):
            self.assertExpectedInline(
                golden(reduce_site()),
                """\
before
x: float8_e4m3fn[64, 32] = input
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[] = input
scale_b: float32[] = input
_scaled_mm_default: bfloat16[64, 48] = aten._scaled_mm.default(x, permute_default, scale_a, scale_b, None, None, \
torch.bfloat16)
all_reduce_default: bfloat16[64, 48] = _c10d_functional.all_reduce.default(_scaled_mm_default, 'sum', '0')
wait_tensor_default: bfloat16[64, 48] = _c10d_functional.wait_tensor.default(all_reduce_default)
return [wait_tensor_default]
after
x: float8_e4m3fn[64, 32] = input
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[] = input
scale_b: float32[] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x, \
'[["matmul_all_reduce-18bd5881", 12288, 8]]', 4096)
chunked_scaled_matmul_all_reduce_default = overlap_inductor.chunked_scaled_matmul_all_reduce.default(agree_default, x, \
permute_default, None, scale_a, scale_b, 'bfloat16', False, '{"bands": 0, "transport": "auto"}', 'sum', '0', \
'matmul_all_reduce-18bd5881')
getitem: bfloat16[64, 48] = <built-in function getitem>(chunked_scaled_matmul_all_reduce_default, 0)
return [getitem]
""",
            )
        with fake_group(8):
            self.assertExpectedInline(
                golden(reduce_site(True)),
                """\
before
x: float8_e4m3fn[256, 32] = input
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[256, 1] = input
scale_b: float32[1, 48] = input
_scaled_mm_default: bfloat16[256, 48] = aten._scaled_mm.default(x, permute_default, scale_a, scale_b, None, None, \
torch.bfloat16)
all_reduce_default: bfloat16[256, 48] = _c10d_functional.all_reduce.default(_scaled_mm_default, 'sum', '0')
wait_tensor_default: bfloat16[256, 48] = _c10d_functional.wait_tensor.default(all_reduce_default)
return [wait_tensor_default]
after
x: float8_e4m3fn[256, 32] = input
w: float8_e4m3fn[48, 32] = input
permute_default: float8_e4m3fn[32, 48] = aten.permute.default(w, [1, 0])
scale_a: float32[256, 1] = input
scale_b: float32[1, 48] = input
agree_default: uint8[1] = overlap_inductor.agree.default('0', plan ..., x, \
'[["matmul_all_reduce-18bd5881", 49152, 8]]', 4096)
chunked_scaled_matmul_all_reduce_default = overlap_inductor.chunked_scaled_matmul_all_reduce.default(agree_default, x, \
permute_default, None, scale_a, scale_b, 'bfloat16', False, '{"bands": 0, "transport": "auto"}', 'sum', '0', \
'matmul_all_reduce-18bd5881')
getitem: bfloat16[256, 48] = <built-in function getitem>(chunked_scaled_matmul_all_reduce_default, 0)
return [getitem]
""",
            )
