"""How a benchmark ends: with status 1 where a row of this library is wrong or failed, or it was stopped.

Peers may fail: their rows say why.
"""

from __future__ import annotations

import typer

from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.console.output import error_console

BROKEN = ("wrong", "failed")


def end_with(file: ResultFile) -> None:
    """Ends the program with status 1, and a line that says why, unless all rows of this library have a time.

    Rows that are unavailable, and those of a screening, need none.
    """
    own = [row for row in file.rows if row["kind"] == "kernel" and row.get("stage") is None]
    broken = [row for row in own if row.get("status") in BROKEN]
    if broken:
        first = broken[0]
        text = (
            f"{len(broken)} of {len(own)} rows of this library have no time; the first, "
            f"{first['implementation']}, {first['status']}: {first['reason']}"
        )
    elif "stopped" in file.facts:
        text = f"stopped: {file.facts['stopped']}"
    else:
        return
    error_console().print(text, style="red", markup=False)
    raise typer.Exit(1)
