"""How a command ends when its user made a mistake."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from flash_helpers.console.output import error_console

USER_ERRORS = (ValueError, OSError, RuntimeError, ModuleNotFoundError)


@contextmanager
def shown_errors() -> Iterator[None]:
    """A user's mistake ends the program with its message and status 2, without a traceback."""
    try:
        yield
    except typer.Exit:
        raise  # a RuntimeError too, and no error
    except USER_ERRORS as error:
        if type(error) is RuntimeError:
            raise  # our errors are subclasses: this is a defect, and its traceback is wanted
        error_console().print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
