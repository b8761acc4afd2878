"""What can go wrong while a kernel is built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class BuildError(RuntimeError):
    """A kernel could not be built."""


class CompilerNotFoundError(BuildError):
    """No usable ``nvcc``: the message lists what was tried and why each was refused."""


class SourcesNotFoundError(BuildError):
    """The kernels' C++ headers are missing from the installation."""


class KernelCacheError(BuildError, OSError):
    """The cache of compiled kernels can't take what was built; the message says why and what to do."""


class KernelCompileError(BuildError):
    """The compiler refused a kernel.

    Attributes:
        command: the command line, ready for a shell.
        errors: the first lines of the compiler's output that name an error.
        log: file with the whole output.
    """

    def __init__(self, what: str, command: str, errors: Sequence[str], log: Path) -> None:
        self.command, self.errors, self.log = command, tuple(errors), log
        lines = "\n  ".join(errors) or "(the compiler printed no error line)"
        super().__init__(f"{what} does not compile:\n  {lines}\ncommand: {command}\nwhole output: {log}")
