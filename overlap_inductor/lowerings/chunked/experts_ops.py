# SPDX-License-Identifier: Apache-2.0
"""The op of schedule ``chunked`` for experts between two exchanges of rows (``experts_launch``).

If there is no workspace for the site, the op runs the plain exchanges and the program's own ops. All ranks do so,
because their workspaces are alike. In a capture, the op does so, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_inductor.lowerings.chunked.merged_program import merged_from_text
from overlap_inductor.lowerings.library import define
from overlap_inductor.lowerings.one_op.ops import Tensors
from overlap_inductor.lowerings.uneven_parts import check_parts
from overlap_inductor.runtime.arena import MESSAGES
from overlap_inductor.runtime.call_order import call_order
from overlap_inductor.runtime.workspace import Launch
from overlap_inductor.runtime.workspace import workspace_of
from overlap_inductor.sites.row_program import RowProgram
from overlap_inductor.sites.row_program import from_text
from overlap_inductor.torch_compat import symmetric
from overlap_inductor.torch_compat.distributed import resolve_group
from overlap_inductor.torch_compat.memory import token_like
from overlap_inductor.transports.messages import needed

Results = tuple[torch.Tensor, Tensors, torch.Tensor]


def _ready(x: torch.Tensor, program: RowProgram, group: dist.ProcessGroup, site: str) -> Launch | None:
    """The site's launch. ``None`` if the site has no workspace, or if a CUDA graph is being captured: the numbers of
    rows come from the host. The call may have any number of rows, because longer parts are sent in several messages."""
    if symmetric.capturing():
        return None
    place = workspace_of(group, x.device)
    row = row_bytes(x, program)
    return place.known(("experts", site, row), lambda: place.launch(site, *needed(group.size(), row), MESSAGES))


def row_bytes(x: torch.Tensor, program: RowProgram) -> int:
    """Bytes of the longer of a row of ``x`` and a row of the results."""
    return max(x.shape[1] * x.element_size(), program.width * getattr(torch, program.dtype).itemsize)


def _plain(
    x: torch.Tensor,
    index: torch.Tensor,
    ends: torch.Tensor,
    rows: Tensors,
    whole: Tensors,
    program: RowProgram,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
) -> tuple[torch.Tensor, Tensors]:
    """What the program as written computes."""
    arrived = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(arrived, x.contiguous(), received, sent, group)
    values = program.run([arrived[index], *rows], whole, ends)
    results = torch.empty_like(values[program.result])
    results[index] = values[program.result]
    buffer = results.new_empty(sum(sent), program.width)
    dist.all_to_all_single(buffer, results, sent, received, group)
    return buffer, [values[one.value].clone() for one in program.handed_out]


def _all_to_all_experts(
    chain: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    ends: torch.Tensor,
    rows: Tensors,
    whole: Tensors,
    program: str,
    sent: Sequence[int],
    received: Sequence[int],
    arrive_sorted: bool,
    group_name: str,
    site: str,
) -> Results:
    group, token, parsed = resolve_group(group_name), token_like(chain), from_text(program)
    launch = _ready(x, parsed, group, site)
    if launch is None:
        check_parts(x.shape[0], sent, received, group.rank(), site)
        return *_plain(x, index, ends, rows, whole, parsed, list(sent), list(received), group), token
    from overlap_inductor.lowerings.chunked.experts_launch import Layer
    from overlap_inductor.lowerings.chunked.experts_launch import all_to_all_experts
    from overlap_inductor.lowerings.chunked.gated_pieces import weights_of_text

    # Only inside ``call_order`` may the ops of the merged program run (``grouped_ops``).
    fast, weights = merged_from_text(program, 1 + len(rows)), weights_of_text(program, 1 + len(rows))
    layer = Layer(x, index, ends, rows, whole, fast, weights, sent, received, arrive_sorted)
    with call_order(x.device):
        return *all_to_all_experts(layer, launch, site), token


def _all_to_all_experts_fake(
    chain: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    ends: torch.Tensor,
    rows: object,
    whole: object,
    program: str,
    sent: Sequence[int],
    received: Sequence[int],
    *args: object,
) -> Results:
    parsed, arrived = from_text(program), sum(received)
    buffer = x.new_empty(sum(sent), parsed.width, dtype=getattr(torch, parsed.dtype))
    handed_out = [x.new_empty(arrived, *h.sizes, dtype=getattr(torch, h.dtype)) for h in parsed.handed_out]
    return buffer, handed_out, chain.new_empty(1)


# Returns ``(returned rows, values of RowProgram.handed_out, next token of the chain)``. ``sent``, ``received``: rows of
# the first exchange to and from each rank. ``arrive_sorted``: each rank's rows arrive in the order of the experts.
define(
    "chunked_all_to_all_experts(Tensor chain, Tensor x, Tensor index, Tensor ends, Tensor[] rows, Tensor[] whole,"
    " str program, SymInt[] sent, SymInt[] received, bool arrive_sorted, str group_name, str site) -> (Tensor,"
    " Tensor[], Tensor)",
    _all_to_all_experts,
    _all_to_all_experts_fake,
)
