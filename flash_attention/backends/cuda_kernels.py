"""Compiled kernels on CUDA devices: found in this process or in the cache on disk, compiled if in neither.

Also what is known of the devices, and the extension that loads kernels.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import torch

from flash_attention.errors import (
    BindingNotBuiltError,
    BuildError,
    CompilerNotFoundError,
    DeviceNotSupportedError,
    KernelLaunchError,
    KernelNotBuiltError,
    NoCudaDeviceError,
)
from flash_helpers import build, environment
from flash_helpers.build.nvcc import find_nvcc
from flash_helpers.kernel_configs import KNOWN_DEVICES, DeviceFacts
from flash_helpers.kernels.families import DIRECTIONS, family_of, kernel_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.messages import say_once

# Blocks an SM can hold, by compute capability: the driver's properties do not say it (CUDA programming
# guide, "Technical Specifications per Compute Capability").
_BLOCKS_PER_SM = {
    (8, 0): 32,
    (8, 6): 16,
    (8, 7): 16,
    (8, 9): 24,
    (9, 0): 32,
    (10, 0): 32,
    (10, 3): 32,
    (12, 0): 24,
}

# What to do about the errors that have a remedy, by cudaError_t.
_REMEDIES = {
    1: "the kernel does not fit this device, or its launcher does not take the arguments; where "
    "infeasible_reason(device_facts_of(device)) is None, it is the arguments: please report the call",
    2: "free GPU memory and call again",
    35: "no usable NVIDIA driver: install or update it; CPU tensors run on the CPU backend",
    100: "no CUDA device is there: see CUDA_VISIBLE_DEVICES; CPU tensors run on the CPU backend",
    209: "the kernel is compiled for another GPU generation; build it for this device's",
    801: "the kernel sums rows on the tensor cores (tensor_row_sums), which is too coarse for an LSE; pass "
    "no lse or choose a kernel without",
    700: "a kernel touched memory that is not its own; CUDA is unusable in this process, start a new one",
}
_UNKNOWN_REMEDY = (
    "if an earlier kernel of this process failed, start a new process; else please report this kernel"
)


# ---------------------------------------------------------------- kernels
_loaded: dict[tuple[Kernel, int], Any] = {}
_lock = threading.Lock()


def get_kernel(kernel: Kernel, device: torch.device | int | str | None = None) -> Any:
    """The loaded kernel (a ``flash_attention_kernels.Kernel``), ready for launches on ``device``.

    Args:
        kernel: the kernel.
        device: a CUDA device; ``None`` or ``"cuda"``: the current one.

    Raises:
        See ``flash_attention.backends.cuda.forward``.
    """
    index = _device_index(device)
    if found := _loaded.get((kernel, index)):
        return found
    with _lock:
        if found := _loaded.get((kernel, index)):
            return found
        facts, family = device_facts_of(index), family_of(kernel)
        target = facts.target
        if not family.runs_on(target):
            raise DeviceNotSupportedError(
                f"cuda:{index} ({facts.name}) is of generation sm_{target}; {kernel.short_form()} is of the "
                f"{family.name} family, which runs on {family.allowed_targets}. "
                f"Choose a configuration of another family, or CPU tensors"
            )
        found = _find_or_build(kernel, target)
        with torch.cuda.device(index):
            try:
                found.load()
            except extension().CudaError as error:
                raise launch_error(kernel, index, error) from None
        _loaded[kernel, index] = found
        return found


def load_kernel(kernel: Kernel, target: int) -> Any | None:
    """The kernel for GPU generation ``target`` if this process or the cache has it; compiles nothing.

    Code for an earlier minor revision of the same generation counts, since the GPU runs it.
    """
    cache = build.KernelCache()
    targets = family_of(kernel).binary_compatible_targets(target)
    for candidate in targets:
        if found := _filed(kernel, candidate):
            return found
    for candidate in targets:
        if library := build.find_library(cache, kernel, candidate):
            try:
                load_library(library)
            except RuntimeError as error:  # removed meanwhile, or of another version: it counts as missing
                say_once(f"a kernel library is not used: {error}")
                continue
            return _filed(kernel, candidate)
    return None


def _filed(kernel: Kernel, target: int) -> Any | None:
    """The kernel if this process has loaded it."""
    digest = 0 if kernel.mod is None else kernel.mod.digest
    return extension().find(kernel.config, kernel.traits, target, digest)


_open_libraries: list[int] = []  # files that were loaded by their number, which must not be used again


def spill_bytes(kernel: Kernel, device: torch.device | int | str | None = None) -> int | None:
    """Bytes of spilled registers, a thread, of a kernel that is built; None: nobody has written them down."""
    from flash_helpers.build.loop_facts import built_facts

    for target in family_of(kernel).binary_compatible_targets(device_facts_of(device).target):
        if (facts := built_facts(kernel, target)) is not None:
            return facts.spill_bytes
    return None


def load_library(path: Path) -> None:
    """Loads a kernel library, whatever its path is made of.

    Raises:
        RuntimeError: it can't be loaded, or is of another version of the binding.
    """
    name = str(path)
    # The loader replaces words such as $ORIGIN, and the binding takes UTF-8 alone: such files go by number.
    if "$" in name or not name.isprintable():
        _open_libraries.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        name = f"/proc/self/fd/{_open_libraries[-1]}"
    extension().load_library(name)


def registered_kernels() -> list[tuple[Kernel, int]]:
    """(kernel, target) of every kernel without a mod that this process has loaded."""
    config_types = {direction.config.__name__: direction.config for direction in DIRECTIONS}
    kernels = []
    for name, values, traits, target in extension().registered():
        # The binding gives enumerations as numbers.
        types = get_type_hints(config_types[name])
        config = config_types[name](**{field: types[field](value) for field, value in values.items()})
        kernels.append((kernel_of(config, **traits), target))
    return kernels


def build_obstacle() -> str | None:
    """Why this machine compiles no kernel on first use, or None."""
    if not environment.jit_enabled():
        return "compiling on first use is off (FLASH_ATTENTION_JIT=0)"
    try:
        find_nvcc()
    except CompilerNotFoundError as error:
        return str(error)
    return None


def _find_or_build(kernel: Kernel, target: int) -> Any:
    if found := load_kernel(kernel, target):
        return found
    if reason := build_obstacle():
        raise _not_built(kernel, target, reason)
    say_compiling(kernel, target)
    try:
        (result,) = build.build_kernels([kernel], [target])
    except CompilerNotFoundError as error:
        raise _not_built(kernel, target, str(error)) from error
    load_library(result.path)
    return _filed(kernel, target)


def say_compiling(kernel: Kernel, target: int) -> None:
    """Tells the user why a call takes long."""
    print(
        f"flash_attention: compiling {kernel.short_form()} for sm_{target} on first use; "
        "FLASH_ATTENTION_JIT=0 forbids it",
        file=sys.stderr,
        flush=True,
    )


def build_at_once(kernels: Iterable[Kernel], device: torch.device) -> None:
    """Compiles those of some kernels that are not built, at the same time, if there are several.

    What fails here is said by ``get_kernel``, which tries again.
    """
    target = device_facts_of(device).target
    missing = [kernel for kernel in dict.fromkeys(kernels) if load_kernel(kernel, target) is None]
    if len(missing) < 2 or build_obstacle() is not None:
        return

    def compile_one(kernel: Kernel) -> None:
        say_compiling(kernel, target)
        with contextlib.suppress(BuildError, OSError):
            build.build_kernels([kernel], [target])

    with ThreadPoolExecutor(len(missing)) as threads:
        list(threads.map(compile_one, missing))


def _not_built(kernel: Kernel, target: int, reason: str) -> KernelNotBuiltError:
    targets = family_of(kernel).binary_compatible_targets(target)
    built = {name for name, _ in build.built_kernels(build.KernelCache(), targets)}
    built |= {other.short_form() for other, other_target in registered_kernels() if other_target in targets}
    closest = tuple(difflib.get_close_matches(kernel.short_form(), sorted(built), n=3, cutoff=0.0))
    command = build.build_command(kernel, target)
    listed = "".join(f"\n  {name}" for name in closest) or " none"
    return KernelNotBuiltError(
        f"{kernel.short_form()} is not built for sm_{target}, and {reason}\n"
        f"Closest of the {len(built)} built kernels:{listed}\nTo build it: {command}",
        closest,
        command,
    )


def launch_error(kernel: Kernel, index: int, error: Exception) -> KernelLaunchError:
    """What CUDA said (a ``CudaError``), with kernel, device and what to do."""
    text, code = error.args
    facts = device_facts_of(torch.device("cuda", index))
    return KernelLaunchError(
        f"{kernel.short_form()} on cuda:{index} ({facts.name}, compute capability "
        f"{facts.capability[0]}.{facts.capability[1]}): {text}; {_REMEDIES.get(code, _UNKNOWN_REMEDY)}",
        code,
    )


# ---------------------------------------------------------------- devices
def device_facts_of(device: torch.device | int | str | None = None) -> DeviceFacts:
    """The facts of a CUDA device that is there. Rates that the driver does not tell come from the known
    model of the same name, and are 0 for other models.

    Raises:
        NoCudaDeviceError: there is no such CUDA device.
    """
    return _facts_of_index(_device_index(device))


@functools.cache
def _facts_of_index(index: int) -> DeviceFacts:
    p = torch.cuda.get_device_properties(index)
    known = next((facts for facts in KNOWN_DEVICES.values() if facts.name == p.name), None)
    reserved = DeviceFacts.smem_reserved_per_block
    return DeviceFacts(
        name=p.name,
        capability=(p.major, p.minor),
        sm_count=p.multi_processor_count,
        smem_per_sm=p.shared_memory_per_multiprocessor,
        smem_per_block=getattr(
            p, "shared_memory_per_block_optin", p.shared_memory_per_multiprocessor - reserved
        ),
        l2_bytes=p.L2_cache_size,
        threads_per_sm=p.max_threads_per_multi_processor,
        blocks_per_sm=_BLOCKS_PER_SM.get((p.major, p.minor), DeviceFacts.blocks_per_sm),
        dram_bandwidth=known.dram_bandwidth if known else 0.0,
        mma_flops=known.mma_flops if known else 0.0,
        clock_hz=known.clock_hz if known else 0.0,
    )


def _device_index(device: torch.device | int | str | None) -> int:
    if not torch.cuda.is_available():
        raise NoCudaDeviceError(
            "no CUDA device can be used here: torch.cuda.is_available() is false. Check the driver, "
            "CUDA_VISIBLE_DEVICES and that torch is a CUDA build; CPU tensors run on the CPU backend"
        )
    if device is None:
        return torch.cuda.current_device()
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        raise NoCudaDeviceError(f"device {device} is not a CUDA device; pass cuda, cuda:0, …")
    return torch.cuda.current_device() if device.index is None else device.index


# ---------------------------------------------------------------- the extension
@functools.cache
def extension() -> ModuleType:
    """``flash_attention_kernels``. Raises BindingNotBuiltError."""
    try:
        import flash_attention_kernels
    except ImportError as error:
        raise BindingNotBuiltError(
            f"the extension flash_attention_kernels does not load ({error}). It is built when the package is "
            "installed where there is a C++20 compiler: install g++ 10 or newer, then, in the folder of the "
            "sources, pip install --force-reinstall --no-deps . or, to use them in place, "
            "python setup.py build_ext --inplace"
        ) from error
    return flash_attention_kernels
