# SPDX-License-Identifier: Apache-2.0
"""The check that keeps sentences short. It must find a long sentence in every kind of text, and must not take code for
a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tools import load_tool

check = load_tool("check_sentences")

LONG = "Word" + " word" * check.MOST_WORDS
"""A sentence of one word too many."""
SHORT = "Word" + " word" * (check.MOST_WORDS - 1)


def found(path: Path, text: str) -> list[tuple[int, int]]:
    """``(line, words)`` of each long sentence."""
    path.write_text(text, encoding="utf-8")
    return [(line, words) for line, words, _ in check.long_sentences(path)]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f'"""First.\n\n{LONG}."""\n', 3),
        (f'"""Wrapped {SHORT}\nover lines."""\n', 1),
        (f'def f():\n    """First.\n\n    Args:\n        x: {LONG}\n        y: other\n    """\n', 5),
        (f'def f():\n    """First.\n\n    - item\n    - {LONG}\n    """\n', 5),
        (f"x = 1\n# {SHORT}\n# word\n", 2),
        (f"x = 1  # {LONG}\n", 1),
        (f"x = 1\nraise ValueError('{LONG}')\n", 2),
        (f"raise ValueError(f'{LONG} {{x}}')\n", 1),
        (f"f'short {{\"{LONG}\"}}'\n", 1),
        (f"'Short.' '{LONG}'.strip()\n", 1),
        (f'x = 1\n"""{LONG}"""\n', 2),
    ],
)
def test_long_sentences_of_python_are_found(tmp_path: Path, text: str, line: int) -> None:
    assert [found_line for found_line, _ in found(tmp_path / "a.py", text)] == [line]


@pytest.mark.parametrize(
    "text",
    [
        f'"""{SHORT}. {SHORT}! {SHORT}: {SHORT}. `code` {SHORT[5:]}."""\n',
        f'"""{SHORT}::\n\n    {LONG}\n\nEnd."""\n',
        f'"""A drawing.\n\n    {LONG}\n"""\n',
        f'"""Commands.\n\npython -m {LONG}\n"""\n',
        f'def f():\n    """First.\n\n    Args:\n        x: {SHORT[5:]}\n        y: {SHORT[5:]}\n    """\n',
        f'"""First.\n\n- {SHORT}\n- {SHORT}\n"""\n',
        f"# {SHORT}.\n# {SHORT}.\n",
        f"a = 1  # {SHORT}\nb = 1  # {SHORT}\n",
        f'"""``{LONG}`` is one word."""\n',
        f'x = """\nimport sys\nprint([{", ".join(LONG.split())}])\nprint(sys.path)\n"""\n',
        f"x = 'mov.u32 {LONG};'\n",
        f"x = 'op(Tensor chain, {LONG}) -> Tensor'\n",
        f"x = '{SHORT}\\n{SHORT}'\n",
    ],
)
def test_short_sentences_and_code_pass(tmp_path: Path, text: str) -> None:
    assert found(tmp_path / "a.py", text) == []


def test_pages(tmp_path: Path) -> None:
    """Prose and lists of a page are read, but not its code, tables, HTML and generated parts."""
    skipped = (
        f"# Title\n\n```\n{LONG}\n```\n\n| {LONG} |\n\n<div>{LONG}</div>\n\n<!-- made: a -->\n{LONG}\n<!-- end -->\n"
    )
    lines = skipped.count("\n")
    page = f"{skipped}\n{SHORT}\nword.\n\n- {SHORT}.\n- {LONG},\n  word\n\n{SHORT} · {SHORT}\n"
    assert found(tmp_path / "a.md", page) == [(lines + 2, check.MOST_WORDS + 1), (lines + 6, check.MOST_WORDS + 2)]


def test_an_abbreviation_ends_no_sentence() -> None:
    assert [text for _, text in check.sentences("One, e.g. Two. Three (`x`.) Four.")] == [
        "One, e.g. Two.",
        "Three (`x`.)",
        "Four.",
    ]


def test_a_long_sentence_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.md"
    path.write_text(f"{SHORT}.\n\n{LONG}.\n")
    assert check.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{path}:3: {check.MOST_WORDS + 1} words: {LONG}.\n"
    path.write_text(f"{SHORT}.\n")
    assert check.main([str(tmp_path)]) == 0
