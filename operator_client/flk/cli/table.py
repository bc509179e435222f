"""Print rows of text in aligned columns, as kubectl does."""

from __future__ import annotations

from collections.abc import Container, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, without: Container[str] = ()) -> list[str]:
    """Return lines whose columns are as wide as their widest cell. An empty cell becomes ``-``.

    Columns whose titles are among ``without`` are left out.
    """
    cells = [list(header), *([cell or "-" for cell in row] for row in rows)]
    shown = [column for column, title in enumerate(header) if title not in without]
    widths = {column: max(len(row[column]) for row in cells) for column in shown}
    return ["   ".join(row[column].ljust(width) for column, width in widths.items()).rstrip() for row in cells]
