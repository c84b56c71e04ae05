# SPDX-License-Identifier: Apache-2.0
"""The outcomes of a sweep that compares each model with overlap to the model without overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import with_and_without
from tests.support.with_and_without import outcome


def _row(**fields: Any) -> dict[str, Any]:
    return {"error": 1e-6, "rounding": 1e-7, "sites": {"a overlapped": 1}, "fell_back": 0, "notices": [], **fields}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "right"),
        ({"sites": {"a kept": 1}}, "nothing overlapped"),
        ({"fell_back": 2}, "fell back"),
        ({"error": 1e-3}, "wrong"),
        ({"error": 1e-3, "rounding": 5e-4}, "right"),
        ({"error": float("nan")}, "wrong"),
        ({"error": 0.5, "rounding": 0.5}, "nothing to compare"),
        ({"notices": ["the rewrite failed"]}, "wrong"),
        ({"could_not_be": "overlapped"}, "wrong"),
        ({"could_not_be": "compiled without overlap"}, "does not run without overlap"),
    ],
)
def test_the_worst_rank_decides(fields: dict[str, Any], words: str) -> None:
    # If nothing is overlapped on one rank, but a site is overlapped on another rank, the outcome is "right".
    assert outcome([_row(), _row(**fields)]) == (words if fields.get("sites") is None else "right")
    assert outcome([_row(**fields), _row(**fields)]) == words


def test_a_rank_that_died_is_wrong() -> None:
    assert outcome([_row(), "a traceback"]) == "wrong"


def test_a_number_that_differs_with_overlap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_and_without, "_backend", lambda stage, *_: stage)

    def build() -> Any:
        values = {"run eagerly": 1.0, "compiled without overlap": 1.0, "overlapped": 1.1}
        return lambda backend: {"out": torch.ones(3), "other": torch.tensor([values[backend], 2.0])}

    row = with_and_without.compared(build)
    assert row["worst"] == "other" and row["error"] == pytest.approx(0.05) and outcome([row]) == "wrong"


def test_a_wrong_result_is_not_hidden_by_a_result_of_rounding_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_and_without, "_backend", lambda stage, *_: stage)

    def build() -> Any:
        wrong = {"run eagerly": 1.0, "compiled without overlap": 1.0, "overlapped": 1.01}
        rounding = {"run eagerly": 1e-9, "compiled without overlap": 2e-9, "overlapped": 9e-7}
        return lambda backend: {"wrong": torch.tensor([wrong[backend]]), "zero": torch.tensor([rounding[backend]])}

    row = with_and_without.compared(build)
    assert row["worst"] == "wrong" and outcome([row]) == "wrong"


def test_an_error_is_named_with_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(with_and_without, "_backend", lambda stage, *_: stage)

    def build() -> Any:
        def computation(backend: str) -> dict[str, torch.Tensor]:
            assert backend != "overlapped", "no such site"
            return {"out": torch.ones(3)}

        return computation

    row = with_and_without.compared(build)
    assert row["could_not_be"] == "overlapped" and "no such site" in row["error_text"] and outcome([row]) == "wrong"
