"""Tables as lines of text: every cell whole, one line a row, nothing drawn around them."""

from __future__ import annotations

from rich.table import Column, Table
from rich.text import Text

GAP = "  "
INDENT = "    "


def plain_lines(table: Table, name_apart: bool = False) -> list[str]:
    """The lines of a table: title, header, rows, caption.

    Args:
        table: its cells are strings or texts. Line breaks within a cell become spaces.
        name_apart: put each cell of the widest column on a line of its own, above the rest of its row:
            for terminals that are narrower than the table.
    """
    lines = _texts(table.title) if table.title else []
    columns = [_cells(column, table.show_header) for column in table.columns]
    rights = [column.justify == "right" for column in table.columns]
    above: list[str] = []
    if name_apart and len(columns) > 1:
        widest = max(range(len(columns)), key=lambda place: max(map(len, columns[place]), default=0))
        above = columns.pop(widest)
        rights.pop(widest)
    widths = [max(map(len, cells), default=0) for cells in columns]
    for number, cells in enumerate(zip(*columns, strict=True)):
        padded = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(cells, widths, rights, strict=True)
        ]
        row = GAP.join(padded).rstrip()
        if not above:
            lines.append(row)
            continue
        lines += [above[number]] if above[number] else []
        lines += [INDENT + row] if row else []
    return lines + (_texts(table.caption) if table.caption else [])


def _cells(column: Column, with_header: bool) -> list[str]:
    """The column's texts, each of one line, its header first."""
    header = [column.header] if with_header else []
    return [" ".join(_texts(cell)) for cell in (*header, *column.cells)]


def _texts(cell: object) -> list[str]:
    """The lines of a cell, without styles."""
    plain = cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain
    return [line.strip() for line in plain.splitlines()]
