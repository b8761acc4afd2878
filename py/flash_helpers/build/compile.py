"""Compiling kernels: one object a kernel, in parallel, linked into one kernel library.

Objects and libraries live in the cache, so that adding a kernel compiles one file and a second build
compiles none.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import shutil
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
from flash_helpers.build.errors import KernelCacheError, KernelCompileError
from flash_helpers.build.flags import compile_flags
from flash_helpers.build.instantiations import (
    LIBRARY_FILE,
    TABLE_FILE,
    kernel_id,
    kernel_source,
    library_source,
    table_source,
)
from flash_helpers.build.nvcc import Nvcc, find_nvcc
from flash_helpers.build.private_folder import no_room
from flash_helpers.build.ptxas import parse_ptxas
from flash_helpers.build.workplace import bring, workplace
from flash_helpers.host_memory import available_memory
from flash_helpers.kernels.direction import Direction
from flash_helpers.kernels.families import common_direction
from flash_helpers.kernels.kernel import Kernel

# The runtime is linked in and hidden: a process may hold several runtimes, and each library launches
# its kernels through the one that they are registered with.
LINK_FLAGS = (
    "-std=c++20", "-O2", "-shared", "-cudart", "static", "-cudadevrt", "none",
    "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xlinker", "--exclude-libs=ALL",
)  # fmt: skip
MEMORY_PER_JOB = 2 << 30  # bytes; what one compilation of a large kernel may take
_MAX_ERROR_LINES = 8
_ATTEMPTS = 3  # to link objects that another process removes meanwhile
_HEADERS, _LIBRARIES = "include", "toolkit_lib"  # links in the folder that nvcc runs in
_MIN_FREE = 1 << 20  # bytes; with less no step of nvcc gets far
# What nvcc's steps say where a disk, a quota or a limit of the file size is full.
_NO_ROOM = re.compile(
    r"No space left on device|Disk quota exceeded|File too large|[Ff]ile size limit exceeded"
)


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

    kernel: Kernel
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
    kernels: Sequence[Kernel],
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
        KernelCacheError: there is no room, or no folder that can be written.
        NoPlainFolderError: no folder that can be written has a path that nvcc can be given.
    """
    direction = common_direction(kernels)
    direction.family.check_target(target)
    in_turn = list(dict.fromkeys(kernels))
    kernels = sorted(in_turn, key=kernel_id)
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs is {jobs}; allowed: a number of compilations from 1 on")
    cache = cache or KernelCache()
    root = include_root or sources.include_root()
    nvcc = nvcc or find_nvcc()
    compiler = _Compiler(
        direction, target, cache, root, nvcc, sources.digest_of_headers(direction.launcher_header, root)
    )

    for _ in range(_ATTEMPTS):
        compiled = _compile_all(compiler, in_turn, jobs, progress)
        with contextlib.suppress(_ObjectsRemovedError):
            library = compiler.link(table_source(kernels), [compiled[kernel][1] for kernel in kernels])
            return BuildResult(library.path, target, tuple(compiled[kernel][0] for kernel in kernels))
    raise KernelCacheError(
        f"the kernel cache {cache.root} was cleared {_ATTEMPTS} times between compiling and linking; build "
        "again when nothing clears it, or set FLASH_ATTENTION_CACHE_DIR to a folder that nothing else clears"
    )


def _compile_all(
    compiler: _Compiler, kernels: Sequence[Kernel], jobs: int | None, progress: Progress | None
) -> dict[Kernel, tuple[CompiledKernel, Artifact]]:
    """Each kernel with what is known of it and its object."""
    compiled: dict[Kernel, tuple[CompiledKernel, Artifact]] = {}
    with ThreadPoolExecutor(max_workers=max(1, min(jobs or default_jobs(), len(kernels)))) as pool:
        futures = {pool.submit(compiler.compile, kernel): kernel for kernel in kernels}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                kernel = futures[future]
                described = _describe(kernel, future.result())
                compiled[kernel] = described, future.result()
                if progress is not None:
                    progress(described, done, len(kernels))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return compiled


def default_jobs() -> int:
    """Compilations at the same time: ``FLASH_ATTENTION_JOBS``, else one a core as far as memory reaches."""
    if (wanted := environment.jobs()) is not None:
        return wanted
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, available_memory() // MEMORY_PER_JOB))


class _ObjectsRemovedError(Exception):
    """An object is gone that was there a moment ago."""


@dataclass(frozen=True)
class _Compiler:
    """What all units of one build share."""

    direction: Direction
    target: int
    cache: KernelCache
    include_root: Path
    nvcc: Nvcc
    headers_digest: str

    def compile(self, kernel: Kernel) -> Artifact:
        """The object of one kernel."""
        source, name = kernel_source(kernel, self.target), kernel_id(kernel)
        own_flags = compile_flags(self.direction.family, self.target)
        flags = (*own_flags, *environment.nvcc_flags())

        def make(folder: Path) -> tuple[str, dict[str, Any]]:
            start = time.perf_counter()
            with self._workplace(folder) as place:
                (place / f"{name}.cu").write_text(source, encoding="utf-8")
                log = self._run(
                    [*own_flags, "-I", _HEADERS, "-c", f"{name}.cu", "-o", f"{name}.o"],
                    place, kernel.short_form(), name,
                )  # fmt: skip
                shutil.move(place / f"{name}.o", folder / f"{name}.o")
            return f"{name}.o", {
                "kernel": kernel.short_form(),
                "direction": self.direction.name,
                "target": self.target,
                "source": digest_of(source),
                "headers": self.headers_digest,
                "flags": flags,
                "version": flash_helpers.__version__,
                "seconds": time.perf_counter() - start,
                "log": log,
            }

        key = digest_of(
            flash_helpers.__version__,
            self.direction.name,
            source,
            self.headers_digest,
            flags,
            self.nvcc.build,
        )
        return self.cache.get_or_make("objects", key, make)

    def link(self, table: str, objects: Sequence[Artifact]) -> Artifact:
        """The library of objects whose records ``table`` lists."""
        entry_point, name = library_source(), f"flash_{self.direction.label}_sm_{self.target}"

        def make(folder: Path) -> tuple[str, dict[str, Any]]:
            with self._workplace(folder) as place:
                (place / TABLE_FILE).write_text(table, encoding="utf-8")
                (place / LIBRARY_FILE).write_text(entry_point, encoding="utf-8")
                for number, artifact in enumerate(objects):
                    try:
                        bring(artifact.path, place / f"{number}.o")
                    except FileNotFoundError as error:
                        raise _ObjectsRemovedError from error
                # One short argument for what may be hundreds of files.
                (place / "objects.txt").write_text("\n".join(f"{n}.o" for n in range(len(objects))))
                self._run(
                    [*LINK_FLAGS, *([f"-L{_LIBRARIES}"] if self.nvcc.libraries else []), "-I", _HEADERS,
                     LIBRARY_FILE, "-optf", "objects.txt", "-o", f"{name}.so"],
                    place, f"the kernel library {name}", name,
                )  # fmt: skip
                shutil.move(place / f"{name}.so", folder / f"{name}.so")
            reports = {artifact.facts["kernel"]: parse_ptxas(artifact.facts["log"]) for artifact in objects}
            return f"{name}.so", {
                "kernels": list(reports),
                "resources": {kernel: [r.registers, r.spill_bytes] for kernel, r in reports.items()},
            }

        # The objects' keys stand for their contents.
        keys = [artifact.path.parent.name for artifact in objects]
        key = digest_of(flash_helpers.__version__, table, entry_point, keys, LINK_FLAGS, self.nvcc.build)
        return self.cache.get_or_make("libraries", key, make)

    def _workplace(self, folder: Path) -> contextlib.AbstractContextManager[Path]:
        links = {_HEADERS: self.include_root}
        return workplace(folder, links | ({_LIBRARIES: self.nvcc.libraries} if self.nvcc.libraries else {}))

    def _run(self, arguments: Sequence[str], place: Path, what: str, name: str) -> str:
        command = [str(self.nvcc.path.absolute()), *arguments]
        run = subprocess.run(
            command,
            cwd=place,
            env=environment.of_compiler(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if run.returncode == 0:
            return run.stdout
        if not place.exists():
            raise FileNotFoundError(errno.ENOENT, "removed while nvcc ran in it", str(place))
        if _NO_ROOM.search(run.stdout) or shutil.disk_usage(place).free < _MIN_FREE:
            raise no_room(place)
        shown = shlex.join(command)
        log = self.cache.write_text(f"logs/{name}.log", f"{shown}\n\n{run.stdout}")
        raise KernelCompileError(
            f"{what} (sm_{self.direction.family.arch(self.target)})", shown, _error_lines(run.stdout), log
        )


def _describe(kernel: Kernel, artifact: Artifact) -> CompiledKernel:
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
