"""docs/tools.md says what the command line does: commands, options, functions and variables exist."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from flash_helpers.cli import app
from flash_helpers.environment import VARIABLES

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
EXAMPLES = re.findall(r"^\$ flash-attention (.+)$", PAGE, re.MULTILINE)


def test_every_command_has_an_example() -> None:
    assert {shlex.split(line)[0] for line in EXAMPLES} == set(COMMANDS)


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_are_understood(line: str) -> None:
    name, *arguments = shlex.split(line)
    COMMANDS[name].make_context(name, arguments)  # raises for an unknown option or a wrong type


def test_every_function_exists() -> None:
    rows = re.findall(r"^\| `\w+` \| (.+?) \|", PAGE, re.MULTILINE)
    for path in re.findall(r"`(flash_helpers\.[\w.]+)`", " ".join(rows)):
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name)), path


def test_the_table_of_variables_is_the_modules() -> None:
    table = PAGE.split("## Environment variables")[1]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", table, re.MULTILINE)
    assert rows == [tuple(variable) for variable in VARIABLES]
