"""Code blocks of README.rst and the pages under docs.

Needs no package, so that ``.ci/run`` can print blocks with any Python.

``python tests/helpers/pages.py README.rst MARK`` prints the blocks after a comment ``.. ci: MARK``, or those of the
language MARK that have no comment.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Block(NamedTuple):
    """A code block: its language, its comment ("" without one), its first line's number and its text."""

    language: str
    mark: str
    line: int
    code: str


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page, in order."""
    found, mark = [], ""
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if comment := re.match(r"\.\. ci: (.*)", line):
            mark = comment[1]
        elif start := re.match(r"( *)\.\. code-block:: (\w+)", line):
            indent, body = len(start[1]), []
            for text in lines[number + 1 :]:
                if text.strip() and len(text) - len(text.lstrip()) <= indent:
                    break
                body.append(text[indent + 4 :])
            found.append(Block(start[2], mark, number + 3, "\n".join(body).strip("\n") + "\n"))
            mark = ""
    return found


def marked(page: Path, mark: str) -> str:
    """The text of the blocks with a comment, or of a language without one; an error if there is none."""
    found = [block.code for block in blocks(page) if mark == (block.mark or block.language)]
    if not found:
        raise SystemExit(f"{page}: no code block marked {mark!r}")
    return "\n".join(found)


if __name__ == "__main__":
    print(marked(Path(sys.argv[1]), sys.argv[2]), end="")
