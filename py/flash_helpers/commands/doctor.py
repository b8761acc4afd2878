"""``flash-attention doctor``: what works here, what does not, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flash_helpers.commands.doctor_checks import BROKEN, CHECKS, LIMITED, OK, Check
from flash_helpers.console.output import console_for, write_json
from flash_helpers.console.writable import check_file


def doctor() -> list[Check]:
    """Looks at everything that the library stands on. Raises nothing: what fails is a check that failed."""
    return [_guarded(name, check) for name, check in CHECKS.items()]


def doctor_command(json_path: Path | None = None, console: Console | None = None) -> list[Check]:
    """Prints what ``doctor`` finds."""
    check_file(json_path)
    checks = doctor()
    console = console or console_for(json_path)
    table = Table("check", "status", "found")
    colours = {OK: "green", LIMITED: "yellow", BROKEN: "red"}
    for check in checks:
        text = check.found + (f"\n→ {check.advice}" if check.advice else "")
        table.add_row(check.name, Text(check.status, style=colours[check.status]), Text(text))
    console.print(table)
    console.print(summary(checks), markup=False)
    write_json(json_path, {"summary": summary(checks), "checks": [asdict(check) for check in checks]})
    return checks


def summary(checks: list[Check]) -> str:
    """One line: what a user can do here."""
    by_name = {check.name: check.status for check in checks}
    if BROKEN in (by_name["torch"], by_name["a small call"]):
        return "attention does not work here: see what is broken"
    if by_name["GPU"] != OK:
        return "attention works on the CPU; kernels can be configured, explained and tested"
    if by_name["binding"] != OK:
        return "attention works on the CPU only: the GPU is there, the binding is not"
    if by_name["compiler"] != OK:
        return "attention works on the GPU with the kernels that are built; no others can be compiled"
    return "attention works on the GPU; kernels are compiled on first use"


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a doctor must not fall ill
        reason = f"{type(error).__name__}: {error}"
        return Check(name, BROKEN, reason, "fix what is named here; checks above may say how")


def exit_code(checks: list[Check]) -> int:
    """1 when something is broken."""
    return int(any(check.status == BROKEN for check in checks))
