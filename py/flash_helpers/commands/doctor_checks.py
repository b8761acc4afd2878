"""What ``doctor`` looks at: one function a check."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import flash_helpers
from flash_helpers import environment
from flash_helpers.build import CompilerNotFoundError, KernelCache, SourcesNotFoundError, built_kernels
from flash_helpers.build.nvcc import DISASSEMBLER_PACKAGES, PIP_PACKAGES, find_nvcc
from flash_helpers.build.sass import find_tool
from flash_helpers.build.sources import include_root
from flash_helpers.commands.binding_check import binding_difference
from flash_helpers.commands.cache import cache_parts
from flash_helpers.console.output import shown_bytes
from flash_helpers.kernels.families import FAMILIES, kernel_of
from flash_helpers.results.database import TuningDatabase, default_path
from flash_helpers.results.device import driver_version

OK, LIMITED, BROKEN = "ok", "limited", "broken"
MIN_CUDA_DRIVER = {12: 525, 13: 580}
"""The oldest driver that runs programs of a CUDA major version (CUDA release notes, minor compatibility)."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        status: ``ok``; ``limited``: something works only in part; ``broken``: it does not work.
        found: what was found.
        advice: what to do about it; empty when there is nothing to do.
    """

    name: str
    status: str
    found: str
    advice: str = ""


def _python() -> Check:
    found = f"Python {platform.python_version()}, {platform.machine()}, version {flash_helpers.__version__}"
    return Check("Python", OK, found)


def _torch() -> Check:
    import torch

    cuda = torch.version.cuda
    found = f"torch {torch.__version__}, " + (f"CUDA {cuda}" if cuda else "without CUDA")
    if driver_version() and not cuda:
        return Check("torch", LIMITED, found, "there is a driver: install a CUDA build of torch for the GPU")
    return Check("torch", OK, found)


def _driver() -> Check:
    import torch

    version = driver_version()
    if version is None:
        return Check(
            "driver", LIMITED, "no NVIDIA driver", "for a GPU: install the driver; the CPU needs none"
        )
    major, needed = int(version.split(".")[0]), 0
    if torch.version.cuda:
        needed = MIN_CUDA_DRIVER.get(int(torch.version.cuda.split(".")[0]), 0)
    if major < needed:
        advice = f"torch's CUDA {torch.version.cuda} needs driver {needed} or newer: update it"
        return Check("driver", BROKEN, version, advice)
    return Check("driver", OK, version)


def _gpu() -> Check:
    import torch

    if not torch.cuda.is_available():
        if driver_version() is None:
            return Check("GPU", LIMITED, "none", "calls with CPU tensors run on the CPU backend")
        hidden = environment.visible_devices()
        hint = f"CUDA_VISIBLE_DEVICES is {hidden!r}; " if hidden is not None else ""
        advice = f"{hint}see the checks of torch and driver, and nvidia-smi"
        return Check("GPU", BROKEN, "a driver, but no usable GPU", advice)
    lines, able = [], 0
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        target = 10 * p.major + p.minor
        families = [family.name for family in FAMILIES if family.runs_on(target)]
        able += bool(families)
        runs = f"runs {' and '.join(families)} kernels" if families else "too old for every kernel family"
        memory = shown_bytes(p.total_memory)
        lines.append(f"cuda:{index} {p.name}, sm_{target}, {p.multi_processor_count} SMs, {memory}: {runs}")
    if not able:
        allowed = "; ".join(f"{family.name}: {family.allowed_targets}" for family in FAMILIES)
        return Check("GPU", LIMITED, "\n".join(lines), f"kernels need {allowed}; use CPU tensors")
    return Check("GPU", OK, "\n".join(lines))


def _binding() -> Check:
    try:
        module = importlib.import_module("flash_attention_kernels")
    except ImportError as error:
        advice = (
            "only the GPU needs it. Install g++ 10 or newer and install the package again; in a checkout: "
            "python setup.py build_ext --inplace"
        )
        return Check("binding", LIMITED, f"the extension does not load: {error}", advice)
    found, again = str(module.__file__), "build it again: install the package again; in a checkout: "
    if wrong := binding_difference(module):
        return Check("binding", BROKEN, f"{found}: {wrong}", f"{again}python setup.py build_ext --inplace")
    return Check("binding", OK, found)


def _sources() -> Check:
    try:
        return Check("kernel sources", OK, str(include_root()))
    except SourcesNotFoundError as error:
        return Check("kernel sources", BROKEN, str(error), "install the package again")


def _compiler() -> Check:
    try:
        nvcc = find_nvcc()
    except CompilerNotFoundError as error:
        advice = (
            f"to compile kernels: pip install {' '.join(PIP_PACKAGES)}, or the CUDA toolkit with CUDA_HOME"
        )
        return Check("compiler", LIMITED, str(error).split("\nInstall")[0], advice)
    if shutil.which("g++") is None:
        return Check("compiler", LIMITED, f"nvcc {nvcc.build}, but no g++, which it needs", "install g++")
    return Check("compiler", OK, f"nvcc {nvcc.build}, {nvcc.path}")


def _disassembler() -> Check:
    if tool := find_tool("cuobjdump"):
        return Check("disassembler", OK, str(tool))
    packages = " ".join(DISASSEMBLER_PACKAGES)
    advice = f"only explain --compile needs it, to count instructions: pip install {packages}"
    return Check("disassembler", LIMITED, "no cuobjdump", advice)


def _cache() -> Check:
    cache = KernelCache()
    root = cache.writable_root()
    size = sum(part.bytes for part in cache_parts(cache))
    kernels = built_kernels(cache, range(80, 200))
    targets = sorted({target for _, target in kernels})
    built = f"{len(kernels)} kernels built" + (
        f" for {', '.join(f'sm_{t}' for t in targets)}" if targets else ""
    )
    found = f"{root}, {shown_bytes(size)}, {built}"
    if root != cache.root:
        advice = "set FLASH_ATTENTION_CACHE_DIR to a folder of yours that can be written, and by nobody else"
        return Check("kernel cache", LIMITED, f"{cache.root} can't be used; {found}", advice)
    free = shutil.disk_usage(root).free
    if free < 1 << 30:
        return Check("kernel cache", LIMITED, found, f"only {shown_bytes(free)} are free on its disk")
    return Check("kernel cache", OK, found)


def _tuning() -> Check:
    path = default_path()
    if not path.exists():
        if not _can_make(path):
            advice = "tune needs it: set FLASH_ATTENTION_TUNING_DB to a file that can be made"
            return Check("tuning results", LIMITED, f"{path} can't be made", advice)
        return Check(
            "tuning results",
            OK,
            f"none of this machine's yet ({path}): kernels are chosen by the shipped tables and the model",
        )
    database = TuningDatabase(path)
    devices = database.devices()
    names = "; ".join(f"{d.gpu}, driver {d.driver}" for d in devices) or "nothing yet"
    try:
        database.check_writable()
    except OSError as error:
        advice = (
            "tune can add nothing: make the file writable, or name another with FLASH_ATTENTION_TUNING_DB"
        )
        return Check("tuning results", LIMITED, f"{path}: {names}; not writable: {error}", advice)
    return Check("tuning results", OK, f"{path}: {names}")


def _can_make(path: Path) -> bool:
    nearest = next(folder for folder in path.parents if os.path.lexists(folder))
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _variables() -> Check:
    problems = []
    for read in (environment.jit_enabled, environment.jobs):
        try:
            read()
        except ValueError as error:
            problems.append(str(error))
    unknown = environment.unknown_variables()
    values = {**environment.set_variables(), **dict.fromkeys(unknown, "(unknown)")}
    found = ", ".join(f"{name}={value}" for name, value in values.items()) or "none set"
    status = BROKEN if problems else LIMITED
    problems += [f"{name} is not read; the nearest known is {nearest}" for name, nearest in unknown.items()]
    if problems:
        return Check("variables", status, found, "; ".join(problems))
    return Check("variables", OK, found)


def _optional() -> Check:
    if importlib.util.find_spec("matplotlib") is None:
        advice = "pip install matplotlib"
        return Check("optional packages", LIMITED, "no matplotlib: reports can't be written", advice)
    return Check("optional packages", OK, "matplotlib")


def _small_call() -> Check:
    """Runs a kernel that is at hand: nothing is compiled for it."""
    import torch

    from flash_attention import forward
    from flash_helpers.benchmark.correctness import output_error, reference
    from flash_helpers.kernel_configs import get_kernels_to_build

    configs = get_kernels_to_build()
    config, device = configs[0], torch.device("cpu")
    if torch.cuda.is_available():
        from flash_attention.backends.cuda import load_kernel

        major, minor = torch.cuda.get_device_capability()
        ready = (c for c in configs if load_kernel(kernel_of(c), 10 * major + minor) is not None)
        if (built := next(ready, None)) is not None:
            config, device = built, torch.device("cuda", torch.cuda.current_device())
    shape = (1, 256, 2, config.d_head)
    q, k, v = (torch.randn(shape, dtype=config.dtype.to_torch_dtype(), device=device) for _ in range(3))
    wrong = output_error(forward(config, q, k, v), reference(q, k, v)).wrong_reason(config.dtype)
    found = f"{config.short_form()} on {device}"
    if wrong:
        return Check("a small call", BROKEN, f"{found}: wrong, {wrong}", "please report this")
    return Check("a small call", OK, f"{found}: right")


CHECKS: dict[str, Callable[[], Check]] = {
    "Python": _python,
    "torch": _torch,
    "driver": _driver,
    "GPU": _gpu,
    "binding": _binding,
    "kernel sources": _sources,
    "compiler": _compiler,
    "disassembler": _disassembler,
    "kernel cache": _cache,
    "tuning results": _tuning,
    "variables": _variables,
    "optional packages": _optional,
    "a small call": _small_call,
}
"""In the order in which they are shown: each stands on those before it."""
