"""Small tables of HTML, as notebooks show them."""

from __future__ import annotations

import html
from collections.abc import Sequence

from flk.terminal import printable


def pairs_table(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table with a name and a text in each row; rows without a text are left out."""
    return _table([_head([name]) + _cells([text]) for name, text in rows if text])


def rows_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with the names of its columns in the first row."""
    return _table([_head(names), *map(_cells, rows)])


def _table(rows: Sequence[str]) -> str:
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _head(names: Sequence[str]) -> str:
    return "".join(f"<th>{html.escape(name)}</th>" for name in names)


def _cells(texts: Sequence[str]) -> str:
    texts = [html.escape(printable(" ".join(text.split()))) for text in texts]
    return "".join(f'<td style="text-align: left">{text}</td>' for text in texts)
