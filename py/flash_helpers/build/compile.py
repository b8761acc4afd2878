"""Compiling kernels: one object a kernel, in parallel, linked into one kernel library.

Objects and libraries live in the cache, so that adding a kernel compiles one file and a second build
compiles none.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flash_helpers
from flash_helpers import environment
from flash_helpers.build import sources
from flash_helpers.build.cache import Artifact, KernelCache, digest_of
from flash_helpers.build.errors import KernelCompileError
from flash_helpers.build.instantiations import (
    LIBRARY_FILE,
    TABLE_FILE,
    kernel_id,
    kernel_source,
    library_source,
    table_source,
)
from flash_helpers.build.nvcc import Nvcc, find_nvcc
from flash_helpers.build.ptxas import parse_ptxas
from flash_helpers.kernels.families import KernelFamily, common_family
from flash_helpers.kernels.kernel import ForwardKernel

# No fast-math: what a kernel approximates it says in its own code.
COMPILE_FLAGS = ("-std=c++20", "-O3", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden")
# The runtime is linked in and hidden: a process may hold several runtimes, and each library launches
# its kernels through the one that they are registered with.
LINK_FLAGS = (
    "-std=c++20", "-O2", "-shared", "-cudart", "static", "-cudadevrt", "none",
    "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xlinker", "--exclude-libs=ALL",
)  # fmt: skip
MEMORY_PER_JOB = 2 << 30  # bytes; what one compilation of a large kernel may take
_MAX_ERROR_LINES = 8


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled kernel and what the compiler said of it.

    Attributes:
        kernel: the kernel.
        seconds: how long its compilation took, when it took place.
        registers: registers a thread.
        spill_bytes: spilled registers' stores and loads, bytes a thread.
        static_smem_bytes: statically allocated shared memory, bytes a block.
        warnings: the compiler's warnings and lost optimisations.
        log: the compiler's whole output.
        cached: whether it was compiled before.
    """

    kernel: ForwardKernel
    seconds: float
    registers: int
    spill_bytes: int
    static_smem_bytes: int
    warnings: tuple[str, ...]
    log: str
    cached: bool


@dataclass(frozen=True)
class BuildResult:
    """A kernel library.

    Attributes:
        path: the shared object.
        target: GPU generation it is compiled for, 80 for sm_80.
        kernels: what it holds.
    """

    path: Path
    target: int
    kernels: tuple[CompiledKernel, ...]


Progress = Callable[[CompiledKernel, int, int], None]
"""Called after each kernel with (kernel, kernels done, kernels in all), in the calling thread."""


def build_library(
    kernels: Sequence[ForwardKernel],
    target: int,
    jobs: int | None = None,
    progress: Progress | None = None,
    *,
    cache: KernelCache | None = None,
    include_root: Path | None = None,
    nvcc: Nvcc | None = None,
) -> BuildResult:
    """Compiles kernels of one family and links them into a library, both through the cache.

    Args:
        kernels: the kernels, compiled in this order; the library is the same in any.
        target: GPU generation, 80 for sm_80.
        jobs: compilations at the same time; ``None`` takes ``default_jobs()``.
        progress: told of every kernel.
        cache, include_root, nvcc: in place of the user's cache, the package's headers, and the
            compiler that is found.

    Raises:
        ValueError: no kernel, or kernels of several families, or a family without this target.
        CompilerNotFoundError: no usable compiler.
        KernelCompileError: the compiler refused a kernel; the kernels that are not begun are not tried.
    """
    family = common_family(kernels)
    family.check_target(target)
    in_turn = list(dict.fromkeys(kernels))
    kernels = sorted(in_turn, key=kernel_id)
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs}; allowed: a number of compilations from 1 on")
    cache = cache or KernelCache()
    root = include_root or sources.include_root()
    nvcc = nvcc or find_nvcc()
    compiler = _Compiler(
        family, target, cache, root, nvcc, sources.digest_of_headers(family.launcher_header, root)
    )

    objects: dict[ForwardKernel, Artifact] = {}
    compiled: dict[ForwardKernel, CompiledKernel] = {}
    with ThreadPoolExecutor(max_workers=max(1, min(jobs or default_jobs(), len(kernels)))) as pool:
        futures = {pool.submit(compiler.compile, kernel): kernel for kernel in in_turn}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                kernel = futures[future]
                objects[kernel] = future.result()
                compiled[kernel] = _describe(kernel, objects[kernel])
                if progress is not None:
                    progress(compiled[kernel], done, len(kernels))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    library = compiler.link(table_source(kernels), [objects[kernel] for kernel in kernels])
    return BuildResult(library.path, target, tuple(compiled[kernel] for kernel in kernels))


def default_jobs() -> int:
    """Compilations at the same time: ``FLASH_ATTENTION_JOBS``, else one a core as far as memory reaches."""
    if (wanted := environment.jobs()) is not None:
        return wanted
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, _available_memory() // MEMORY_PER_JOB))


@dataclass(frozen=True)
class _Compiler:
    """What all units of one build share."""

    family: KernelFamily
    target: int
    cache: KernelCache
    include_root: Path
    nvcc: Nvcc
    headers_digest: str

    @property
    def _flags(self) -> tuple[str, ...]:
        arch = self.family.arch(self.target)
        return (*COMPILE_FLAGS, "-gencode", f"arch=compute_{arch},code=sm_{arch}")

    def compile(self, kernel: ForwardKernel) -> Artifact:
        """The object of one kernel."""
        source, name = kernel_source(kernel, self.target), kernel_id(kernel)

        def make(folder: Path) -> tuple[str, dict[str, Any]]:
            unit = folder / f"{name}.cu"
            unit.write_text(source, encoding="utf-8")
            start = time.perf_counter()
            log = self._run(
                [*self._flags, "-I", self.include_root, "-c", unit, "-o", folder / f"{name}.o"],
                kernel.short_form(),
                name,
            )
            return f"{name}.o", {
                "kernel": kernel.short_form(),
                "seconds": time.perf_counter() - start,
                "log": log,
            }

        flags = (*self._flags, *environment.nvcc_flags())
        key = digest_of(flash_helpers.__version__, source, self.headers_digest, flags, self.nvcc.build)
        return self.cache.get_or_make("objects", key, make)

    def link(self, table: str, objects: Sequence[Artifact]) -> Artifact:
        """The library of objects whose records ``table`` lists."""
        entry_point, name = library_source(), f"flash_{self.family.name}_sm_{self.target}"

        def make(folder: Path) -> tuple[str, dict[str, Any]]:
            (folder / TABLE_FILE).write_text(table, encoding="utf-8")
            (folder / LIBRARY_FILE).write_text(entry_point, encoding="utf-8")
            # One short argument for what may be hundreds of paths.
            (folder / "objects.txt").write_text(
                "\n".join(f'"{artifact.path}"' for artifact in objects), encoding="utf-8"
            )
            self._run(
                [*LINK_FLAGS, *self.nvcc.link_flags, "-I", self.include_root, folder / LIBRARY_FILE,
                 "-optf", folder / "objects.txt", "-o", folder / f"{name}.so"],
                f"the kernel library {name}", name,
            )  # fmt: skip
            reports = {artifact.facts["kernel"]: parse_ptxas(artifact.facts["log"]) for artifact in objects}
            return f"{name}.so", {
                "kernels": list(reports),
                "resources": {kernel: [r.registers, r.spill_bytes] for kernel, r in reports.items()},
            }

        # The objects' keys stand for their contents.
        keys = [artifact.path.parent.name for artifact in objects]
        key = digest_of(flash_helpers.__version__, table, entry_point, keys, LINK_FLAGS, self.nvcc.build)
        return self.cache.get_or_make("libraries", key, make)

    def _run(self, arguments: Sequence[str | Path], what: str, name: str) -> str:
        command = [str(self.nvcc.path), *map(str, arguments)]
        run = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if run.returncode == 0:
            return run.stdout
        shown = shlex.join(command)
        log = self.cache.write_text(f"logs/{name}.log", f"{shown}\n\n{run.stdout}")
        raise KernelCompileError(
            f"{what} (sm_{self.family.arch(self.target)})", shown, _error_lines(run.stdout), log
        )


def _describe(kernel: ForwardKernel, artifact: Artifact) -> CompiledKernel:
    log = artifact.facts["log"]
    report = parse_ptxas(log)
    return CompiledKernel(
        kernel,
        seconds=artifact.facts["seconds"],
        registers=report.registers,
        spill_bytes=report.spill_bytes,
        static_smem_bytes=report.static_smem_bytes,
        warnings=report.warnings,
        log=log,
        cached=not artifact.made_now,
    )


def _error_lines(log: str) -> list[str]:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    signs = ("error", "fatal", "not found", "cannot find", "no such file")
    errors = [line for line in lines if any(sign in line.lower() for sign in signs)]
    return (errors or lines[-_MAX_ERROR_LINES:])[:_MAX_ERROR_LINES]


def _available_memory() -> int:
    """Memory that new processes can use, bytes: the machine's, or the container's limit if it is lower."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        if limit != "max":
            available = min(available, int(limit) - used)
    except (OSError, ValueError):
        pass  # no such files here: the first figure is good enough
    return max(0, available)
