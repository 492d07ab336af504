"""`%%ondevice` on a cell's first line -> `%ondevice`, so that IPython runs the cell as its own.

An input transformer, as IPython's manual describes them: text in, text out, and no line moves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from IPython.core.inputtransformer2 import cell_magic, classic_prompt, ipython_prompt, leading_indent

_RANK = re.compile(r"(?<!\{)\{(rank|local_rank)\}(?!\})")
# These must show their help and not run the body.
_HELP = {"-h", "--help"}


class PromoteCellMagics:
    """Turn the cell form of our magics into the line form.

    Args:
        needs_body: for each magic, the options with which it runs the body itself, so that it stays a cell magic.
    """

    has_side_effects = True  # else `check_complete` takes the promoted line for a whole cell (IPython 7.17 and newer)

    def __init__(self, needs_body: Mapping[str, Collection[str]]) -> None:
        self._header = re.compile(rf"%%({'|'.join(map(re.escape, needs_body))})(?!\S)(.*)")
        self._needs_body = {name: {*options, *_HELP} for name, options in needs_body.items()}

    def __call__(self, lines: list[str]) -> list[str]:
        """Return a cell's lines, the first of them promoted where it is one of ours."""
        if not lines or not lines[0].startswith("%%"):
            return lines
        if not self._is_promoted(lines):
            return self._spared(lines)
        return [lines[0][1:], *self._below(lines[1:])]

    def _is_promoted(self, lines: list[str]) -> bool:
        header = self._header.match(lines[0])
        if header is None or "?" in header[2] or header[2].rstrip().endswith("\\"):
            return False  # not ours, asks for help, or would swallow the next line as a line magic
        has_body = any(line.strip() for line in lines[1:])
        options = re.split(r"\s#", header[2], maxsplit=1)[0].split()
        return not has_body or self._needs_body[header[1]].isdisjoint(word.partition("=")[0] for word in options)

    def _spared(self, lines: list[str]) -> list[str]:
        """Keep IPython from taking `cuda:{rank}` for a variable here: each engine has its own rank."""
        if self._header.match(lines[0]) is None or "--engines" not in lines[0]:
            return lines
        return [_RANK.sub(r"{{\1}}", lines[0]), *lines[1:]]

    def _below(self, lines: list[str]) -> list[str]:
        """Do with the body what IPython does with a cell: `%%time` may stand in it, prompts, an indent."""
        blank = next((place for place, line in enumerate(lines) if line.strip()), len(lines))
        cell = lines[blank:]
        for transform in (leading_indent, classic_prompt, ipython_prompt, self, cell_magic):
            cell = transform(cell)
        return [*lines[:blank], *cell]
