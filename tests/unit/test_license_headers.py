# SPDX-License-Identifier: Apache-2.0
"""The check of licence headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tools import load_tool

check = load_tool("check_license_headers")
HEADER = "# SPDX-License-Identifier: Apache-2.0\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", HEADER),
        ("import x\n", HEADER + "import x\n"),
        ("#!/bin/sh\nls\n", f"#!/bin/sh\n{HEADER}ls\n"),
        (f'"""Doc."""\n{HEADER}', f'{HEADER}"""Doc."""\n{HEADER}'),
    ],
)
def test_the_line_is_written_once_at_the_top(text: str, expected: str) -> None:
    assert check.with_header(text) == expected
    assert check.with_header(expected) == expected


def test_a_file_without_the_line_fails_until_it_is_fixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "SINGLE", ("Makefile",))
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "new.py").write_text("x = 1\n")
    (tmp_path / "Makefile").write_text(HEADER)
    assert check.main([]) == 1
    assert "tools/new.py:1: does not begin with" in capsys.readouterr().out
    assert check.main(["--fix"]) == 0
    assert (tmp_path / "tools" / "new.py").read_text() == f"{HEADER}x = 1\n"
    assert check.main([]) == 0
