# SPDX-License-Identifier: Apache-2.0
"""Fails if a sentence of the documentation, of a docstring, of a comment or of a message has more than 28 words.

Programs, code blocks, drawings, tables, commands and the generated parts of pages are skipped.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import textwrap
import tokenize
from bisect import bisect
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("overlap_inductor", "bench", "tools", "tests", "examples", "docs", *(p.name for p in ROOT.glob("*.md")))
MOST_WORDS = 28

_STOP = r"(?<!e\.g)(?<!i\.e)[.!?][)\"'*_`]*"
_END = re.compile(rf"(?:{_STOP}|:)\s+(?=[A-Z])|{_STOP}\s+(?=[(\[\"'`*<\d])| [·|] ")
"""The end of a sentence. A colon ends a sentence if a capital letter follows."""
_CODE_SPAN = re.compile(r"(`+)[^`]+\1")
_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_ITEM = re.compile(r"([-*+]|\d+\.)\s")
_COMMAND = re.compile(r"(python3?|torchrun|overlap-inductor|pip|[A-Z_]+=\S+) (?!\S+:)")
_TABLE_RULE = re.compile(r"=+( +=+)+$")
_GENERATED = re.compile(r"<!-- made: .*?<!-- end -->", re.DOTALL)
_FENCED = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
_PROGRAM = re.compile(r"[;{}]\s*$|^\w*\((Tensor|SymInt).*\) -> ", re.MULTILINE)
"""A line of assembly or C++, or the schema of an op."""


def paragraphs(text: str) -> Iterator[list[tuple[int, str]]]:
    """The paragraphs of prose in ``text``, each as a list of ``(line, text)``. Lines are counted from 0. A list item
    and an entry of ``Args:`` are paragraphs of their own. ``text`` must be dedented."""
    found: list[tuple[int, str]] = []
    skip_above: int | None = None  # lines with a larger indentation are code
    skip_to_blank = in_item = False
    section: int | None = None  # the indentation of the last ``Args:``
    for number, line in enumerate(text.split("\n")):
        words = line.strip()
        indent = len(line) - len(line.lstrip())
        if not words:
            yield found
            found, skip_to_blank = [], False
            continue
        if skip_above is not None and indent > skip_above:
            continue
        skip_above = None
        if skip_to_blank or words.startswith(("|", "<")):
            continue
        if section is not None and indent <= section:
            section = None
        in_item = in_item and (indent > 0 or bool(found))
        starts_item = bool(_ITEM.match(words)) or (section is not None and indent == section + 4)
        if starts_item or _SECTION.match(words) or words.startswith("#"):
            yield found
            found, in_item = [], starts_item
            section = indent if _SECTION.match(words) else section
        if not found and (_TABLE_RULE.match(words) or _COMMAND.match(words)):
            skip_to_blank = True
        elif not found and indent > 0 and section is None and not in_item:
            skip_above = 0  # a drawing
        else:
            found.append((number, words))
            if words.endswith("::"):
                skip_above = indent
            if words.startswith("#") or words.endswith("::"):
                yield found
                found = []
    yield found


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """``(line, sentence)`` of each sentence of prose in ``text``. Lines are counted from 0."""
    for paragraph in paragraphs(text):
        joined = " ".join(words for _, words in paragraph)
        starts = [sum(len(words) + 1 for _, words in paragraph[:index]) for index in range(len(paragraph))]
        begin = 0
        for end in [*(match.end() for match in _END.finditer(joined)), len(joined)]:
            if begin < end:
                yield paragraph[bisect(starts, begin) - 1][0], joined[begin:end].strip()
            begin = end


def word_count(sentence: str) -> int:
    """The number of words of ``sentence``. A code span counts as one word. Signs do not count."""
    return sum(any(map(str.isalnum, word)) for word in _CODE_SPAN.sub("code", sentence).split())


def is_program(text: str) -> bool:
    """Whether a string constant is Python, assembly, C++ or the schema of an op."""
    if _PROGRAM.search(text):
        return True
    try:
        ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return False
    return True


def _dedented(text: str) -> str:
    """A docstring without the indentation that all lines after the first share. Empty lines do not count, except the
    last one: its indentation is that of the closing quotes."""
    first, *rest = text.split("\n")
    shared = min((len(line) - len(line.lstrip()) for line in rest if line.strip() or line is rest[-1]), default=0)
    return "\n".join([first.lstrip(), *(line[shared:] for line in rest)])


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """``(line, text)`` of each docstring, of each block of comments, and of each string with enough words for a long
    sentence. Programs are left out. Lines are counted from 1.

    In a string that is no docstring, each line is a paragraph. ``X`` stands for each value of an f-string.
    """
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, _dedented(node.value.value)
            continue
        text = None
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            waiting += [part for part in node.values if isinstance(part, ast.FormattedValue)]
        else:
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        if text is not None and isinstance(node, ast.expr) and word_count(text) > MOST_WORDS and not is_program(text):
            yield from ((node.lineno, line.strip()) for line in text.split("\n"))
    yield from _comments(source)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    last = 0  # the line of the block's last comment
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            own_line = token.line.strip() == token.string
            if block and not (own_line and token.start[0] == last + 1):
                yield last - len(block) + 1, "\n".join(block)
                block = []
            block.append(token.string.lstrip("#").removeprefix(" "))
            last = token.start[0]
    if block:
        yield last - len(block) + 1, "\n".join(block)


def page_text(page: str) -> str:
    """``page`` with an empty line for each line of its code blocks and generated parts."""
    for pattern in (_GENERATED, _FENCED):
        page = pattern.sub(lambda match: "\n" * match[0].count("\n"), page)
    return page


def long_sentences(path: Path) -> list[tuple[int, int, str]]:
    source = path.read_text(encoding="utf-8")
    texts = python_texts(source) if path.suffix == ".py" else [(1, page_text(source))]
    found = [
        (first + line, word_count(sentence), sentence) for first, text in texts for line, sentence in sentences(text)
    ]
    return sorted(each for each in found if each[1] > MOST_WORDS)


def main(arguments: Sequence[str]) -> int:
    """``arguments``: files and folders. Without any, those in ``PLACES`` are read."""
    found = False
    for place in [Path(each) for each in arguments] or [ROOT / each for each in PLACES]:
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.suffix in (".py", ".md"):
                for line, words, sentence in long_sentences(path):
                    print(f"{path}:{line}: {words} words: {sentence}")
                    found = True
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
