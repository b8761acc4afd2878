"""Commands of single modules, ``python -m flash_helpers.…``; they behave as ``flash-attention`` does."""

from __future__ import annotations

from collections.abc import Callable

import typer

from flash_helpers.console.pipe import patient_output


def run_alone(main: Callable[..., object]) -> None:
    """Runs a function as a command: its parameters are the options, ``-h`` shows them."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command()(main)
    with patient_output():
        app()
