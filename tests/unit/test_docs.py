# SPDX-License-Identifier: Apache-2.0
"""The pages of ``docs/``: generated parts are up to date, drawings are right, names in the text exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from bench import report
from overlap_inductor.lowerings import registry
from overlap_inductor.report import dump
from overlap_inductor.report import runs
from overlap_inductor.report import words
from tests.unit import near_miss_reasons  # noqa: F401  (registers its graphs)
from tests.unit import site_reasons  # noqa: F401
from tests.unit import stretch_reasons  # noqa: F401
from tests.unit.reasons import CASES
from tools import make_docs
from tools.doc_parts import drawings
from tools.doc_parts import pages
from tools.doc_parts import reasons
from tools.doc_parts import samples
from tools.doc_parts import switches
from tools.doc_parts.timeline import MATMUL
from tools.doc_parts.timeline import TRANSFER
from tools.doc_parts.timeline import Timeline

PICTURES = [pair for pairs in drawings.PICTURES.values() for pair in pairs]


def test_generated_parts_are_up_to_date() -> None:
    outdated = [path.name for path in make_docs.outdated()]
    assert not outdated, f"{', '.join(outdated)}: run python tools/make_docs.py"


@pytest.mark.parametrize("path", report.PICTURES, ids=lambda path: path.name)
def test_pictures_were_drawn_from_the_rows(path: Path) -> None:
    rows, _ = report.PICTURES[path]
    with Image.open(path) as image:
        assert json.loads(image.info["Description"]) == rows(), "run python -m bench.report"


def test_pictures_of_the_pages_are_pictures() -> None:
    """A symbolic link to an image may be stored as a text file that holds only the link's target."""
    found = {
        (path.parent / name).resolve()
        for path in (make_docs.README, *pages.pages())
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", path.read_text())
    }
    assert found == set(report.PICTURES)
    for path in found:
        with Image.open(path) as image:
            image.load()
            assert min(image.size) > 300


@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: path.name)
def test_pictures_scroll_on_a_phone(path: Path) -> None:
    """A picture must not shrink to the width of a phone."""
    text = path.read_text()
    found = re.findall(r"^!\[", text, re.MULTILINE)
    assert len(re.findall(r'^<div class="picture" markdown>\n\n!\[', text, re.MULTILINE)) == len(found)


def css(selector: str) -> str:
    """The declarations of one rule of the pages' style sheet."""
    text = (pages.ROOT / "docs" / "assets" / "docs.css").read_text()
    found = re.findall(rf"^ *{re.escape(selector)} {{ (.*) }}$", text, re.MULTILINE)
    assert len(found) == 1, f"{len(found)} rules for {selector}"
    return found[0]


@pytest.mark.parametrize("path", report.PICTURES, ids=lambda path: path.name)
def test_pictures_have_no_white_ground_in_the_dark(path: Path) -> None:
    """In the dark scheme, the style sheet inverts the pictures: white becomes black, and the page's background
    shows."""
    rule = css('[data-md-color-scheme="slate"] .picture img')
    assert "invert(1)" in rule and "mix-blend-mode: lighten" in rule
    with Image.open(path) as image:
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_names_in_tables_are_not_broken() -> None:
    """The theme allows a line break anywhere in code, so a narrow column would split a switch's name."""
    assert css(".md-typeset td code") == "word-break: normal;"


def test_the_colour_scheme_follows_the_system() -> None:
    """If the first palette is not the automatic one, a browser keeps the scheme of the first visit."""
    media = re.findall(r'- media: "(.*)"', (pages.ROOT / "mkdocs.yml").read_text())
    assert media[0] == "(prefers-color-scheme)" and len(media) == 3


def test_the_page_on_reports_names_every_file_and_outcome() -> None:
    text = (pages.DOCS / "reading-a-report.md").read_text()
    rows = [cell for line in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for cell in re.findall(r"`(.+?)`", line)]
    assert {*dump.FILES, runs.MARK, *words.STATUSES} <= set(rows)


def test_every_part_is_on_one_page() -> None:
    found = [name for path in (make_docs.README, *pages.pages()) for name in pages.names(path.read_text())]
    assert sorted(found) == sorted(make_docs.PARTS)


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs prints only a remark about a page that readers cannot reach."""
    linked = set(re.findall(r": ([\w-]+\.md)$", (pages.ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert linked == {path.name for path in pages.pages()}


def test_reasons_are_those_that_graphs_give() -> None:
    """``reasons.codes`` searches the sources for reason codes. It must find exactly those that the graphs of ``CASES``
    give."""
    assert set(reasons.codes()) == {code for code, _, _ in CASES.values()}


def test_a_code_without_a_meaning_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasons, "GROUPS", {"all but one": {code: "x" for code in reasons.codes() if code != "hoist"}})
    with pytest.raises(ValueError, match="without a meaning: \\['hoist'\\]"):
        reasons.sections()


def test_every_switch_is_in_the_table() -> None:
    table = switches.table()
    for field, text in switches.docstrings().items():
        assert f"| `{field}` |" in table and text


@pytest.mark.parametrize("text", ["<!-- made: x -->\n", "<!-- end -->\n"])
def test_a_part_needs_both_ends(text: str) -> None:
    with pytest.raises(ValueError, match="needs one"):
        pages.filled(text, {"x": lambda: "new"})


def test_only_the_part_is_replaced() -> None:
    text = "before\n<!-- made: x -->\nold\n<!-- end -->\nafter"
    assert pages.filled(text, {"x": lambda: "new"}) == "before\n<!-- made: x -->\n\nnew\n\n<!-- end -->\nafter"
    with pytest.raises(KeyError):
        pages.filled(text, {})


@pytest.mark.parametrize("picture", range(len(PICTURES)))
def test_drawings_are_possible(picture: int) -> None:
    """In a drawing, work starts after its inputs, and boxes of one lane do not overlap. No part of the matmul is
    missing. A schedule's drawing ends earlier and exposes less than the plain drawing."""
    plain, overlapped = (make() for make in PICTURES[picture])
    for timeline in (plain, overlapped):
        for box in timeline.boxes:
            assert all(other.end <= box.start + 1e-9 for other in box.after)
            same = [b for b in timeline.boxes if b.lane == box.lane and b is not box]
            assert all(b.end <= box.start + 1e-9 or box.end <= b.start + 1e-9 for b in same)
    work = [sum(b.end - b.start for b in t.boxes if b.kind == MATMUL) for t in (plain, overlapped)]
    assert work[1] >= work[0] - 1e-9
    shown = [sum(end - start for _, start, end in t.exposed()) for t in (plain, overlapped)]
    assert shown[1] < shown[0] and overlapped.end < plain.end


def test_exposed_is_what_no_matmul_covers() -> None:
    timeline = Timeline("", ("a", "b"))
    first = timeline.add("a", "", 2)
    moved = timeline.add("b", "", 5, TRANSFER, after=[timeline.add("b", "", 1, "other")])
    timeline.add("a", "", 1, after=[first, timeline.add("a", "", 1, "other")])
    assert [(box, start, end) for box, start, end in timeline.exposed()] == [(moved, 2, 3), (moved, 4, 6)]


def test_schedules_page_names_every_schedule_and_real_ops() -> None:
    text = (pages.DOCS / "schedules.md").read_text()
    assert re.findall(r"^## (\w+)", text, re.MULTILINE) == ["keep", *(s.name for s in registry.SCHEDULES)]
    registry.define_ops()
    named = [
        n for part in re.findall(r"^\*\*Ops\.\*\*(.+?)\n\n", text, re.M | re.S) for n in re.findall(r"`(\w+)`", part)
    ]
    assert len(named) > 20
    missing = [n for n in named if not n.startswith("_") and not hasattr(torch.ops.overlap_inductor, n)]
    assert missing == []


@pytest.mark.parametrize("path", [*pages.pages(), pages.ROOT / "README.md"], ids=lambda path: path.name)
def test_commands_name_modules_that_exist(path: Path) -> None:
    named = re.findall(r"-m ((?:tests|bench)\.[\w.]+\w)", path.read_text())
    missing = [name for name in named if not (pages.ROOT / f"{name.replace('.', '/')}.py").is_file()]
    assert missing == []


def test_samples_run_in_order_in_one_folder(tmp_path: Path) -> None:
    """A sample must see the files of earlier samples. An expected output is that of the sample before it."""
    text = (
        "<!-- file: a.txt -->\n```text\none\n```\n"
        "```bash\nexit 1\n```\n"
        "<!-- runs -->\n```bash\ncat a.txt\n```\n"
        "<!-- output -->\n```text\nold\n```\n"
        "<!-- runs in the checkout -->\n```python\nimport os; print(os.path.exists('mkdocs.yml'))\n```\n\n"
        "<!-- output -->\n```text\nTrue\n```\n"
    )
    outputs = samples.run(samples.samples(text), tmp_path)
    assert [(sample.content, output) for sample, output in outputs] == [("old\n", "one\n"), ("True\n", "True\n")]
    assert samples.with_outputs(text, outputs) == text.replace("old", "one")


def test_a_failing_sample_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(samples.SampleError, match="ended with 3"):
        samples.run(samples.samples("<!-- runs -->\n```bash\nexit 3\n```\n"), tmp_path)


def test_another_version_of_torch_is_not_a_difference() -> None:
    assert samples.same("torch 2.13.0+cpu, 2 sites", "torch 2.11.0+cu130, 2 sites")
    assert not samples.same("torch 2.13.0+cpu, 2 sites", "torch 2.13.0+cpu, 1 site")


def test_readme_is_short() -> None:
    """What does not fit belongs on a page of ``docs``."""
    assert len(make_docs.README.read_text().splitlines()) <= 180
