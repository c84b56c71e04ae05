# SPDX-License-Identifier: Apache-2.0
"""The plan of small messages: one-shot or two-shot, the segments of a call, and the workspace. A *segment* is
the part of a row that one block sends.

- One-shot has one leg: each rank sends its partial rows to all peers, and sums all rows.
- Two-shot has two legs: each rank sends its partial rows to their owners. Each owner sums its rows, and sends the sums
  to all peers.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlap_inductor.lowerings.small_message.parameters import HALVES
from overlap_inductor.lowerings.small_message.parameters import SmallParameters
from overlap_inductor.lowerings.small_message.parameters import needed
from overlap_inductor.lowerings.small_message.parameters import needed_up_to
from overlap_inductor.lowerings.small_message.parameters import parameters_of
from overlap_inductor.lowerings.small_message.parameters import settings_for
from overlap_inductor.lowerings.small_message.parameters import why_not


@pytest.mark.parametrize(
    ("world_size", "rows", "two_shot"),
    [
        (2, 512, False),
        (4, 1, False),
        (4, 16, False),
        (4, 128, True),
        (8, 1, False),
        (8, 4, False),
        (8, 16, True),
        (8, 128, True),
    ],
)
def test_the_second_leg_pays_if_one_shot_sends_much_more(world_size: int, rows: int, two_shot: bool) -> None:
    """The hidden size is 8192 in bf16, so a row has 16 KiB."""
    assert settings_for(world_size, rows, 8192, 2)["two_shot"] is two_shot


def test_two_legs_to_many_peers_go_in_narrow_segments_and_small_blocks() -> None:
    """Small blocks can hold only narrow segments. With many rows, each row of 5120 elements is one segment, so blocks
    are large."""
    assert settings_for(8, 16, 8192, 2) == {"two_shot": True, "segment": 1024, "warps": 4}
    assert settings_for(4, 128, 8192, 2) == {"two_shot": True, "segment": 2048, "warps": 8}
    assert settings_for(8, 513, 5120, 2)["warps"] == 8


@given(st.integers(2, 16), st.integers(1, 600), st.integers(1, 2048).map(lambda n: 8 * n))
def test_a_call_is_cut_so_that_a_block_can_wait_for_it(world_size: int, rows: int, columns: int) -> None:
    p = SmallParameters(**settings_for(world_size, rows, columns, 2))
    segments = -(-columns // p.segment)
    assert p.segment & (p.segment - 1) == 0 and world_size * segments <= 32 * p.warps
    nbytes, signals, protocol = needed(p, world_size, rows, columns, 2)
    held = rows * columns * 2 if p.two_shot else 0
    received = -(-rows // world_size) if p.two_shot else rows
    assert protocol == HALVES and nbytes % 256 == 0 and nbytes // 2 >= held + world_size * received * columns * 2
    assert signals == segments * received * (1 + p.two_shot)


@given(st.sampled_from([2, 3, 8]), st.integers(1, 200), st.integers(1, 1024).map(lambda n: 8 * n))
def test_a_site_of_dynamic_rows_has_room_for_each_of_its_calls(world_size: int, most: int, columns: int) -> None:
    """A call with fewer rows may need more bytes. At 8 ranks and hidden size 8192, one-shot with 7 rows needs more than
    two-shot with 8 rows."""
    room = needed_up_to("{}", world_size, most, columns, 2)
    for rows in {1, most // 2 + 1, min(17, most), most}:
        need = needed(parameters_of("{}", world_size, rows, columns, 2), world_size, rows, columns, 2)
        assert need[0] <= room[0] and need[1] <= room[1] and need[2] == room[2]


def test_a_parameter_that_the_plan_fixes_is_not_decided_again() -> None:
    p = parameters_of('{"two_shot": true}', 8, 1, 8192, 2)
    assert (
        p.two_shot
        and p.segment == settings_for(8, 1, 8192, 2)["segment"]
        and p is parameters_of('{"two_shot": true}', 8, 1, 8192, 2)
    )


def test_why_not_names_what_the_kernels_do_not_support() -> None:
    assert why_not(torch.bfloat16, 8, 128, 8192) is None
    for arguments, reason in (
        ((torch.float32, 8, 1, 64), "fp16 or bf16"),
        ((torch.bfloat16, 8, 1, 60), "60 elements; expected a multiple of 8"),
        ((torch.bfloat16, 8, 1, 32768), "from 8 to 16384"),
        ((torch.bfloat16, 32, 1, 64), "32 ranks"),
        ((torch.bfloat16, 8, 4096, 8192), "too many for a small message"),
    ):
        assert reason in (why_not(*arguments) or "")
