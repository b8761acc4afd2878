"""What the library raises beside ``ValueError`` and ``TypeError`` for wrong arguments.

Errors of building a kernel are defined where kernels are built, and are the same classes here.
"""

from __future__ import annotations

from flash_helpers.build.errors import (
    BuildError,
    CompilerNotFoundError,
    KernelCompileError,
    SourcesNotFoundError,
)
from flash_helpers.select.errors import NoKernelError

__all__ = [
    "BindingNotBuiltError",
    "BuildError",
    "CompilerNotFoundError",
    "DeviceNotSupportedError",
    "InfeasibleConfigError",
    "KernelCompileError",
    "KernelLaunchError",
    "KernelNotBuiltError",
    "ModError",
    "NoCudaDeviceError",
    "NoKernelError",
    "PeerLostError",
    "RanksDisagreeError",
    "SourcesNotFoundError",
]


class NoCudaDeviceError(RuntimeError):
    """The CUDA backend was asked for where no CUDA device can be used."""


class ModError(ValueError):
    """A function of scores or of a mask cannot be recorded, or not run where it was asked for.

    Attributes:
        quoted: parts of the message that are the caller's own words, such as a line of the function.
    """

    quoted: tuple[str, ...] = ()  # set afterwards: torch.compile follows no constructor of exceptions


class DeviceNotSupportedError(RuntimeError):
    """The kernel does not run on GPUs of this compute capability."""


class InfeasibleConfigError(ValueError):
    """The configuration cannot run: on any device, or on the one that holds the tensors."""


class BindingNotBuiltError(ImportError):
    """The C++ extension ``flash_attention_kernels`` is missing or does not load."""


class KernelNotBuiltError(BuildError):
    """The kernel is not built and may not or cannot be compiled now.

    Attributes:
        closest: ids of the built kernels that resemble it most.
        command: the shell command that builds it.
    """

    def __init__(self, message: str, closest: tuple[str, ...], command: str) -> None:
        self.closest, self.command = closest, command
        super().__init__(message)


class KernelLaunchError(RuntimeError):
    """CUDA refused to prepare or to launch a kernel.

    Attributes:
        code: the ``cudaError_t``.
    """

    def __init__(self, message: str, code: int) -> None:
        self.code = code
        super().__init__(message)


class RanksDisagreeError(ValueError):
    """The ranks of a context-parallel call were asked for different things, or one refused its arguments."""


class PeerLostError(RuntimeError):
    """A rank of a context-parallel call has ended, or did not answer within the time limit."""
