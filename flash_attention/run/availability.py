"""What runs where the chosen kernel cannot be had. The choice comes first, and does not know what is built.

A kernel that is not built is compiled by the first call that needs it. Where it cannot be compiled, the first
kernel of the same ranking that is built runs in its place: a warning says so once, and the choice says why.
Where the compiler refuses a kernel with a mod, which nobody has compiled before, the next of the ranking are
compiled too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from flash_attention.devices import backend
from flash_attention.errors import BuildError, KernelCompileError
from flash_helpers import generation
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.select.select import Choice, Rejected

Key = tuple[Kernel, torch.device]
RELIEFS = 2  # further kernels that are compiled where a mod leaves too few registers, or one is refused
TOLERATED_SPILLS = 256  # bytes a thread; the load warp of packed sequences spills half as many, and seldom

# Found out in this generation, so that a problem keeps its kernel whatever is built later.
_obstacles: dict[Key, str] = {}  # why a kernel that was wanted cannot be had
_absent: set[Key] = set()  # not built when they were looked for as a substitute
_warned: set[Key] = set()  # once a process


@generation.forgets
def _forget() -> None:
    _obstacles.clear()
    _absent.clear()


def available(
    chosen: Choice, ranking: Callable[[], Sequence[Choice]], device: torch.device, *, build: bool
) -> Choice:
    """The chosen kernel if it is built or can be; else the best that is built, with the reason.

    Args:
        chosen: what ``select`` says.
        ranking: gives all choices, the best first; asked only where the chosen kernel cannot be had.
        device: a CUDA device that is there.
        build: compile the kernel if it is not built; else only say what a call would do.

    Raises:
        BuildError, OSError: it could not be compiled, and no other kernel is built.
    """
    kernel = chosen.kernel
    obstacle = _obstacles.get((kernel, device))
    if obstacle is None:
        if _load(kernel, device):
            return _with_registers(chosen, device, build)
        obstacle = backend("cuda").build_obstacle()
        if obstacle is None and not build:
            return replace(chosen, reason=f"{chosen.reason}; it is not built yet: the first call compiles it")
    error: Exception | None = None
    if obstacle is None:
        try:
            backend("cuda").get_kernel(kernel, device)
        except (BuildError, OSError) as failure:
            error, obstacle = failure, f"compiling it failed: {failure}"
        else:
            return _with_registers(chosen, device, build)
    substitute = next((other for other in ranking() if _was_built(other.kernel, device)), None)
    if substitute is None and build and kernel.mod is not None and isinstance(error, KernelCompileError):
        substitute = next((other for other in _others(kernel, ranking()) if _compiles(other, device)), None)
    if substitute is None:
        if error is not None:
            raise error
        return replace(chosen, reason=f"{chosen.reason}; it is not built, nor is any other: {obstacle}")
    _obstacles[kernel, device] = obstacle
    if build:
        _warn(kernel, substitute.kernel, device, obstacle)
    return _in_place_of(chosen, substitute, obstacle)


def _with_registers(chosen: Choice, device: torch.device, build: bool) -> Choice:
    """The chosen kernel; where it has a mod and too few registers for it, one of which a thread holds less.

    The first that spills at most ``TOLERATED_SPILLS``, of at most ``RELIEFS`` further ones; where all spill
    more, the one that spills least.
    """
    cuda, kernel = backend("cuda"), chosen.kernel
    if kernel.mod is None:
        return chosen
    spilled = cuda.spill_bytes(kernel, device) or 0
    if spilled <= TOLERATED_SPILLS:
        return chosen
    best, least = kernel, spilled
    for _ in range(RELIEFS):
        config = direction_of(kernel).relieved(kernel.config)
        if config is None:
            break
        kernel = replace(kernel, config=config)
        if build:
            cuda.get_kernel(kernel, device)
        elif not _load(kernel, device):
            break
        own = cuda.spill_bytes(kernel, device) or 0
        if own < least:
            best, least = kernel, own
        if own <= TOLERATED_SPILLS:
            break
    if best is chosen.kernel:
        return replace(chosen, reason=f"{chosen.reason}; beside the mod it spills {spilled} bytes a thread")
    return replace(
        chosen,
        kernel=best,
        reason=f"{chosen.kernel.short_form()} would run ({chosen.reason}), but beside the mod it spills "
        f"{spilled} bytes a thread; this one, of which a thread holds less, spills {least}",
    )


def _load(kernel: Kernel, device: torch.device) -> bool:
    cuda = backend("cuda")
    return cuda.load_kernel(kernel, cuda.device_facts_of(device).target) is not None


def _was_built(kernel: Kernel, device: torch.device) -> bool:
    if (kernel, device) in _absent or (kernel, device) in _obstacles:
        return False
    if _load(kernel, device):
        return True
    _absent.add((kernel, device))
    return False


def _others(kernel: Kernel, ranking: Sequence[Choice]) -> Sequence[Choice]:
    """The best of those that are not this one."""
    return [other for other in ranking if other.kernel != kernel][:RELIEFS]


def _compiles(other: Choice, device: torch.device) -> bool:
    try:
        backend("cuda").get_kernel(other.kernel, device)
    except KernelCompileError:
        return False
    _absent.discard((other.kernel, device))
    return True


def _in_place_of(chosen: Choice, substitute: Choice, obstacle: str) -> Choice:
    against = f"it would run, but is not built: {obstacle}"
    others = tuple(other for other in chosen.rejected if other.kernel != substitute.kernel)
    return replace(
        substitute,
        reason=f"of the kernels that are built it is the best ({substitute.reason}); "
        f"{chosen.kernel.short_form()} would run, but is not built: {obstacle}",
        rejected=(Rejected(chosen.kernel, against), *others) if chosen.rejected else (),
        wanted=chosen.kernel,
    )


def _warn(kernel: Kernel, substitute: Kernel, device: torch.device, obstacle: str) -> None:
    if (kernel, device) in _warned:
        return
    _warned.add((kernel, device))
    warnings.warn(
        f"{kernel.short_form()} is not built, and {substitute.short_form()} runs in its place, which may be "
        f"much slower: {obstacle}\nBuild it ahead of time with flash_attention.prepare(problems) where "
        "compiling is possible. This is said once for each kernel; explain_choice gives the reasons",
        RuntimeWarning,
        stacklevel=2,
    )
