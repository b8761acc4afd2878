"""Standard output whose reader may leave early, as ``head`` does."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class PatientOutput:
    """A stream that drops what nobody reads any more, so that the command ends with its own status.

    Args:
        stream: what to write to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or drops the text."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            return self._drop(len(text))

    def flush(self) -> None:
        """Flushes, or drops what was kept back."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop(0)

    def _drop(self, count: int) -> int:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def patient_output() -> Iterator[None]:
    """While this lasts, a reader of standard output may leave."""
    output = PatientOutput(sys.stdout)
    with contextlib.redirect_stdout(output):  # type: ignore[type-var]
        try:
            yield
        finally:
            output.flush()
