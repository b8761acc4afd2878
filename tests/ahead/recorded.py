"""The kernels that a process asks for, written down at once; the CPU backend computes in their place."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_helpers.kernels.kernel import Kernel
from flash_helpers.trust import untrusted_reason


class Asked(NamedTuple):
    """A kernel that was asked for.

    Attributes:
        kernel: which one.
        chosen: the library chose it; where it has too few registers for its mod, it takes another.
    """

    kernel: Kernel
    chosen: bool


class Journal:
    """A file to which a process writes what it asks for, each kernel once. One that is killed leaves all."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._written: set[Asked] = set()
        self._lock = threading.Lock()

    def ask(self, kernel: Kernel, chosen: bool = False) -> None:
        """Writes a kernel down, unless it was before."""
        asked = Asked(kernel, chosen)
        with self._lock:
            if asked in self._written:
                return
            self._written.add(asked)
            with self._file.open("ab") as file:
                pickle.dump(tuple(asked), file)


def read(folder: Path) -> dict[Kernel, bool]:
    """What all processes have asked for, in order, and whether the library chose it.

    Raises:
        OSError: other users can write there, and what is read could run their code.
    """
    if reason := untrusted_reason(folder):
        raise OSError(f"{reason}; name a folder that you alone can write")
    found: dict[Kernel, bool] = {}
    for file in sorted(folder.glob("*.asked"), key=lambda file: file.stat().st_ctime_ns):
        for kernel, chosen in _read_one(file):
            found[kernel] = chosen or found.get(kernel, False)
    return found


def _read_one(path: Path) -> Iterator[tuple[Kernel, bool]]:
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return


class Loaded:
    """Stands for a kernel that is loaded. It is never launched."""

    needs_tiles = False

    def load(self) -> None:
        """It needs no GPU."""


def install(journal: Journal) -> None:
    """From now on kernels are written down, not compiled; calls run on the CPU by their configurations."""
    import flash_helpers.build as build
    from flash_attention.backends import cpu, cpu_gradients, cuda, cuda_backward, cuda_kernels
    from flash_attention.call import Call, Ran
    from flash_attention.run import availability, launch_cache
    from flash_helpers.select.chosen import Choice
    from tests.ahead.host_tensor import held

    there: dict[Kernel, Loaded] = {}

    def find_or_build(kernel: Kernel, target: int) -> Loaded:
        journal.ask(kernel)
        return there.setdefault(kernel, Loaded())

    def build_kernels(kernels: Iterable[Kernel], targets: Iterable[int], *_: Any, **__: Any) -> list[Any]:
        for kernel in kernels:
            find_or_build(kernel, max(targets))
        return []

    def with_registers(chosen: Choice, device: torch.device, build: bool) -> Choice:
        journal.ask(chosen.kernel, chosen=True)
        return chosen

    def run(call: Call, choice: Choice) -> Ran:
        cuda_kernels.get_kernel(choice.kernel, call.q.device)
        cpu.run(held(call), choice)
        return Ran(choice.kernel)

    def forward(
        kernel: Any, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Any, scale: float, *_: Any
    ) -> None:
        cuda_kernels.get_kernel(kernel, q.device)
        cpu.forward(kernel, *map(held, (q, k, v, o, lse)), scale)

    def run_backward(call: Any, choice: Choice) -> None:
        cuda_kernels.get_kernel(choice.kernel, call.q.device)
        cpu_gradients.run_backward(held(call), choice)

    cuda_kernels._find_or_build = find_or_build
    cuda_kernels._filed = lambda kernel, target: there.get(kernel)
    cuda_kernels.say_compiling = lambda *_: None
    cuda_kernels.build_obstacle = cuda.build_obstacle = lambda: None
    build.find_library = lambda *_: None
    build.build_kernels = build_kernels
    availability._with_registers = with_registers
    cuda.run, cuda.forward, cuda_backward.run_backward = run, forward, run_backward
    launch_cache.remember = lambda *_, **__: None


def believe_in_host_tensors() -> None:
    """The library takes a ``HostTensor`` for what it says to be: a plain tensor of a GPU."""
    from flash_attention.checks import backward, tensors
    from flash_attention.mods.recording import Recording
    from flash_attention.run import torch_ops, tracing
    from tests.ahead.host_tensor import HostTensor

    has_own_dispatch, key = tensors.has_own_dispatch, Recording._key
    for module in (tensors, backward, tracing, torch_ops):
        module.has_own_dispatch = lambda x: not isinstance(x, HostTensor) and has_own_dispatch(x)

    def key_of(self: Recording, x: Tensor) -> Any:
        if isinstance(x, HostTensor) and not x.requires_grad and x.numel():
            self._kept.append(x)
            return (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.device)
        return key(self, x)

    Recording._key = key_of
