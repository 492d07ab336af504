"""Documents as Markdown, for an issue or a pull request: text as a terminal has it, and `<details>`.

In a fence nothing is markup, a mention or a link, so text from outside needs no escapes there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby

from gpumagic.report.document import Block, Document, Fold
from gpumagic.report.text import render as render_text
from gpumagic.report.units import printable

WIDTH = 100
"""Columns of the text."""


def render(document: Document) -> str:
    """Return the document as Markdown."""
    return "\n\n".join(_parts(document.blocks)) + "\n"


def _parts(blocks: Iterable[Block]) -> Iterator[str]:
    for is_fold, group in groupby(blocks, lambda block: isinstance(block, Fold)):
        if is_fold:
            yield from (_details(each) for each in group if isinstance(each, Fold))
        else:
            text = render_text(Document(tuple(group)), WIDTH, unicode=True)
            ticks = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 0)  # more than any that is in it
            yield f"{ticks}text\n{text}\n{ticks}"


def _details(fold: Fold) -> str:
    summary = escape(printable(fold.summary), quote=False).replace("@", "@\N{ZERO WIDTH SPACE}")
    inner = "\n\n".join(_parts(fold.blocks))
    return f"<details><summary>{summary}</summary>\n\n{inner}\n\n</details>"
