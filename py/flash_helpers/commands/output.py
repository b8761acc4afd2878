"""What commands share: where text goes, and ``--json``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

STDOUT = Path("-")


def console_for(json_path: Path | None, width: int = 140) -> Console:
    """Where a command's table goes: standard output, or standard error when that is for the JSON."""
    to_stderr = json_path == STDOUT
    terminal = os.isatty(2 if to_stderr else 1)
    return Console(stderr=to_stderr, width=None if terminal else width, highlight=False)


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
