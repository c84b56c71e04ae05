# SPDX-License-Identifier: Apache-2.0
"""Estimates of schedule ``chunked``, with constants measured on 2, 4 and 8 H200s (bench/results/operators.jsonl,
handed_out.jsonl)."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_inductor.facts.cost_model import SiteSizes
from overlap_inductor.facts.cost_model import collective_seconds
from overlap_inductor.facts.cost_model import copy_seconds
from overlap_inductor.facts.cost_model import kind_of
from overlap_inductor.facts.cost_model import margin_of
from overlap_inductor.facts.cost_model import matmul_seconds
from overlap_inductor.facts.cost_model import receive_seconds
from overlap_inductor.facts.machine import Machine
from overlap_inductor.lowerings.chunked import output_sizes
from overlap_inductor.lowerings.chunked.parameters import MOST_BANDS


@dataclass(frozen=True)
class ChunkedCost:
    """Constants of vendor matmuls on chunks.

    Attributes:
        exposed: exposed fraction of the shorter of matmul and transfer, by kind of site (``cost_model.kind_of``):
            all-gather; reduce-scatter or all-to-all; all-reduce; all-reduce whose transfer takes longer than its
            matmul.
        leg_seconds / leg_peer_seconds: fixed cost of a leg, and of each peer of a leg.
        ranks / exchange_ranks / output_ranks: largest group measured, largest group measured with all-to-alls, and
            with gathers of the matmuls' result.
        copy_exposed: exposed fraction of the copy of the gathered tensor while a matmul runs (2 H200s).
        host_seconds / peer_seconds: host time of a call's launches, and of each peer of a leg.
        gain_seconds: smallest gain over ``keep`` for which a call pays, if the call is not replayed as one CUDA graph.
            A smaller gain does not make a host-bound model faster.
        replay_seconds: host time of a replayed call.
        band_tiles: fewest tiles of a band, if the matmuls contract the exchanged dim (``contracted_launch``) or their
            result is gathered (``output_launch``). This is the number of SMs of an H200.
        band_seconds: fixed cost of each band's matmul and wait, if the matmuls' result is gathered.
        replay_gain_seconds / replay_gain_peer_seconds: smallest gain over ``keep``, per leg, for which a replayed call
            pays. It is the larger of the first constant and of the second constant times the number of peers. Late
            peers may cost this much.
        replay_tiles: a replayed call on W ranks needs W times this many tiles, but never more than
            ``Machine.least_tiles``. A chunk with fewer tiles than ``replay_tiles`` leaves most SMs idle.
    """

    exposed: tuple[float, float, float, float] = (0.12, 0.1, 0.36, 0.25)
    leg_seconds: float = 8e-6
    leg_peer_seconds: float = 7e-6
    ranks: int = 8
    exchange_ranks: int = 4
    output_ranks: int = 4
    copy_exposed: float = 0.45
    host_seconds: float = 200e-6
    peer_seconds: float = 10e-6
    gain_seconds: float = 30e-6
    replay_seconds: float = 40e-6
    replay_gain_seconds: float = 10e-6
    replay_gain_peer_seconds: float = 4e-6
    band_tiles: int = 132
    band_seconds: float = 8e-6
    replay_tiles: int = 48


COST = ChunkedCost()


def _copy_beside_seconds(sizes: SiteSizes, machine: Machine, matmul: float) -> float:
    """Exposed seconds of the copy of the gathered tensor during the last chunk's matmul. This is the larger of two
    times: the time that the copy adds to the matmul, and the time of the copy that the matmul does not hide. The
    chunk is assumed to have a quarter of all rows, or one shard in a group of more than 4 ranks."""
    copy = copy_seconds(sizes, machine)
    return max(COST.copy_exposed * copy, copy - matmul / max(4, sizes.world_size))


def seconds(sizes: SiteSizes, machine: Machine) -> float:
    """Seconds of vendor matmuls on chunks while transfers run. Matmuls that contract the exchanged dim, and those whose
    result is gathered, have estimates of their own (``_contracted_seconds``, ``_output_seconds``). For others, this is
    the sum of:

    - the longer of matmul and transfers
    - an exposed fraction of the shorter one
    - the exposed part of the copy of the gathered tensor
    - for an all-to-all after the matmuls: the copy out of the workspace, which nothing hides
    - a fixed cost for each leg
    """
    if sizes.contracted:
        return _contracted_seconds(sizes, machine)
    if sizes.outputs:
        return _output_seconds(sizes, machine)
    matmul = matmul_seconds(sizes, machine)
    wire = sizes.legs * sizes.bytes_sent / machine.link_bytes
    exposed = COST.exposed[kind_of(sizes, matmul, wire)] * min(matmul, wire) + _copy_beside_seconds(
        sizes, machine, matmul
    )
    exposed += receive_seconds(sizes, machine)
    return (
        max(matmul, wire) + exposed + sizes.legs * (COST.leg_seconds + (sizes.world_size - 1) * COST.leg_peer_seconds)
    )


def _contracted_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """``seconds`` of matmuls that contract the exchanged dim. They run in bands. The first band's transfer is exposed.
    Then each band is copied and multiplied while the next band arrives. Each band has the fixed cost of a leg."""
    bands = max(1, min(MOST_BANDS, sizes.tiles // COST.band_tiles))
    matmul = matmul_seconds(sizes, machine) + 2 * sizes.contracted / machine.memory_bytes
    wire = sizes.bytes_sent / machine.link_bytes
    fixed = bands * (COST.leg_seconds + (sizes.world_size - 1) * COST.leg_peer_seconds)
    return wire / bands + (bands - 1) * max(wire, matmul) / bands + matmul / bands + fixed


def _output_seconds(sizes: SiteSizes, machine: Machine) -> float:
    """``seconds`` of matmuls whose result is gathered. They run in bands, and each band is sent under the matmul of the
    next one. If the matmul takes longer than the transfers, the last band's transfer is exposed, else the first band's
    matmul. The peers' rows are read into their places in the result. So the program's ``cat`` after the gather, which
    puts the slices side by side, is saved, too; this is not counted. Nor is the copy out of the workspace, which only
    a forced transport ``sm_push`` needs."""
    bands = max(1, min(output_sizes.MOST_BANDS, sizes.tiles // COST.band_tiles))
    matmul, wire = matmul_seconds(sizes, machine), sizes.bytes_sent / machine.link_bytes
    exposed = max(COST.exposed[0], 1 / bands) * min(matmul, wire)
    fixed = COST.leg_seconds + (sizes.world_size - 1) * COST.leg_peer_seconds + bands * COST.band_seconds
    return max(matmul, wire) + exposed + fixed


def pays(sizes: SiteSizes, machine: Machine) -> bool:
    """Whether chunks are estimated to be faster than ``keep``:

    - by more than 5 % (1 % in a rewritten stretch; 25 % in groups larger than those measured, and for contracted dims)
    - by more time than the host or late peers may cost

    A call must have enough tiles, and take at least as long on the GPU as on the host. In groups of at most 4 ranks, a
    replayed call needs fewer tiles and a smaller gain than a call that is not replayed.
    """
    peers, estimate = sizes.world_size - 1, seconds(sizes, machine)
    if sizes.replays:
        tiles, host = min(machine.least_tiles, COST.replay_tiles * sizes.world_size), COST.replay_seconds
        gain = sizes.legs * max(COST.replay_gain_seconds, COST.replay_gain_peer_seconds * peers)
    else:
        tiles, host = machine.least_tiles, COST.host_seconds + sizes.legs * peers * COST.peer_seconds
        gain = COST.gain_seconds
    if sizes.tiles < tiles or estimate < host:
        return False
    keep = matmul_seconds(sizes, machine) + collective_seconds(sizes, machine)
    largest = COST.exchange_ranks if sizes.exchanges else COST.output_ranks if sizes.outputs else COST.ranks
    measured = sizes.world_size <= largest
    margin = margin_of(sizes, measured and not sizes.contracted)
    return max(estimate * margin, estimate + gain) < keep
