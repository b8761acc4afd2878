"""What commands share: where text goes and in what form, and ``--json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flash_helpers.console.plain_table import plain_lines

STDOUT = Path("-")
WIDEST = 100_000  # columns of a line on which every table fits
_plain = False


class TextConsole(Console):
    """A console whose tables lose nothing: names stay whole, numbers have all their digits.

    On a terminal, a table that is wider than the window is printed as lines, each name above its numbers.
    Elsewhere, and with ``--plain``, every table is printed as lines, one a row.

    Args:
        plain: print lines on a terminal too.
        options: of ``rich.console.Console``.
    """

    def __init__(self, *, plain: bool = False, **options: Any) -> None:
        super().__init__(highlight=False, **options)
        self.is_plain = plain or not self.is_terminal

    def print(self, *objects: Any, **options: Any) -> None:
        """Prints as ``rich`` does, tables as said above; lines are broken by terminals alone."""
        for table in (o for o in objects if isinstance(o, Table)):
            fits = self.measure(table, options=self.options.update_width(WIDEST)).maximum <= self.width
            if self.is_plain or not fits:
                for line in plain_lines(table, name_apart=not self.is_plain):
                    super().print(line, markup=False, soft_wrap=True)
            else:
                super().print(table)
        others = [o for o in objects if not isinstance(o, Table)]
        if others or not objects:
            super().print(*others, **({"soft_wrap": True} | options))


def use_plain(value: bool) -> bool:
    """Remembers ``--plain`` for the consoles made from now on; the callback of that option."""
    global _plain
    _plain = value
    return value


def console_for(json_path: Path | None = None) -> TextConsole:
    """Where a command's table goes: standard output, or standard error when that is for the JSON."""
    return TextConsole(stderr=json_path == STDOUT, plain=_plain)


def error_console() -> TextConsole:
    """Where progress and errors go: standard error."""
    return TextConsole(stderr=True, plain=_plain)


def write_json(json_path: Path | None, value: Any) -> None:
    """Writes a value as ``--json`` asks: to a file, to standard output (``-``), or not at all."""
    if json_path is None:
        return
    text = json.dumps(value, indent=1) + "\n"
    if json_path == STDOUT:
        sys.stdout.write(text)
    else:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(text, encoding="utf-8")


def shown_bytes(count: int) -> str:
    """A byte count for people, e.g. ``1.2 MiB``."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
