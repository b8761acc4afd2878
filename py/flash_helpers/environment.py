"""The one module that reads environment variables.

Every function reads its variable when it is called, so that a test or a notebook can change it.
``VARIABLES`` lists them all; the documentation's table is made of it.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import NamedTuple


class Variable(NamedTuple):
    """One environment variable: its name, what holds when it is not set, and what it does."""

    name: str
    default: str
    meaning: str


PREFIX = "FLASH_ATTENTION_"
VARIABLES = (
    Variable(
        "FLASH_ATTENTION_JIT",
        "1",
        "compile a kernel that is not built yet on first use; with 0 attention runs the best one that is "
        "built, and one that is named raises KernelNotBuiltError",
    ),
    Variable(
        "FLASH_ATTENTION_CACHE_DIR",
        "$XDG_CACHE_HOME/flash_attention_kernels, else ~/.cache/flash_attention_kernels",
        "folder of compiled kernels",
    ),
    Variable(
        "FLASH_ATTENTION_JOBS", "cores, at most one for 2 GB of memory", "kernels compiled at the same time"
    ),
    Variable(
        "FLASH_ATTENTION_TUNING_DB",
        "tuning-1.sqlite3 in the folder of compiled kernels",
        "file of tuning results",
    ),
    Variable(
        "FLASH_ATTENTION_COMMIT",
        "what git says",
        "commit recorded with measurements, for copies of the sources without their git folder",
    ),
    Variable("CUDA_HOME", "not set", "folder of the CUDA toolkit whose bin/nvcc is tried first"),
    Variable(
        "NVCC_PREPEND_FLAGS",
        "not set",
        "options nvcc puts before its own in each compilation; kernels built with others are built anew. "
        "Paths in them are absolute: nvcc runs in a folder of its own",
    ),
    Variable("NVCC_APPEND_FLAGS", "not set", "the same, behind its own"),
    Variable(
        "KERNELS",
        "not set",
        "which kernels get_kernel_configs() lists: prog, prog_all, all, tune, or B_r,B_c",
    ),
)

_ON = ("1", "true", "on", "yes")
_OFF = ("0", "false", "off", "no")


def jit_enabled() -> bool:
    """``FLASH_ATTENTION_JIT``: whether a kernel that is not built is compiled on first use.

    Raises:
        ValueError: the value is neither on nor off.
    """
    value = os.environ.get("FLASH_ATTENTION_JIT", "").strip().lower() or "1"
    if value in _ON:
        return True
    if value in _OFF:
        return False
    raise ValueError(f"FLASH_ATTENTION_JIT is {value!r}; allowed: {', '.join(_ON)} or {', '.join(_OFF)}")


def cache_dir() -> Path:
    """``FLASH_ATTENTION_CACHE_DIR``: where compiled kernels are kept. The folder may not exist yet."""
    if folder := os.environ.get("FLASH_ATTENTION_CACHE_DIR", "").strip():
        return Path(folder).expanduser().absolute()
    # The XDG specification says that a relative path in it is to be ignored.
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "flash_attention_kernels"
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home folder, as in some containers
        home = Path("/nonexistent")
    return home / ".cache" / "flash_attention_kernels"


def tuning_db() -> Path | None:
    """``FLASH_ATTENTION_TUNING_DB``: the file of tuning results; ``None`` where it is not set."""
    text = os.environ.get("FLASH_ATTENTION_TUNING_DB", "").strip()
    return Path(text).expanduser().absolute() if text else None


def commit() -> str | None:
    """``FLASH_ATTENTION_COMMIT``: the commit to record with measurements; ``None`` where it is not set."""
    return os.environ.get("FLASH_ATTENTION_COMMIT", "").strip() or None


def jobs() -> int | None:
    """``FLASH_ATTENTION_JOBS``: compilations at the same time; ``None`` where it is not set.

    Raises:
        ValueError: the value is no positive integer.
    """
    value = os.environ.get("FLASH_ATTENTION_JOBS", "").strip()
    if not value:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"FLASH_ATTENTION_JOBS is {value!r}; allowed: an integer from 1 on")
    return int(value)


def cuda_homes() -> list[Path]:
    """``CUDA_HOME``: toolkit folders to try first. Empty parts of a list (a stray colon) are skipped."""
    return [Path(part.strip()) for part in os.environ.get("CUDA_HOME", "").split(os.pathsep) if part.strip()]


def nvcc_flags() -> tuple[str, ...]:
    """``NVCC_PREPEND_FLAGS`` and ``NVCC_APPEND_FLAGS``, which nvcc reads itself; those that are set."""
    prepended = os.environ.get("NVCC_PREPEND_FLAGS", "").strip()
    appended = os.environ.get("NVCC_APPEND_FLAGS", "").strip()
    return tuple(flags for flags in (prepended, appended) if flags)


def of_compiler() -> dict[str, str]:
    """The variables that nvcc runs with: this process', with temporary files in the folder it runs in."""
    moved = ("TMPDIR", "TMP", "TEMP", "PWD", "OLDPWD")
    return {**{name: value for name, value in os.environ.items() if name not in moved}, "TMPDIR": "."}


def visible_devices() -> str | None:
    """``CUDA_VISIBLE_DEVICES``, which the CUDA driver reads; ``None`` where it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def set_variables() -> dict[str, str]:
    """Those of ``VARIABLES`` that are set and not empty."""
    values = {variable.name: os.environ.get(variable.name, "") for variable in VARIABLES}
    return {name: value for name, value in values.items() if value}


def unknown_variables() -> dict[str, str]:
    """Variables that are set and named like the library's, but unknown: to the known one most like it."""
    known = [variable.name for variable in VARIABLES]
    unknown = [name for name in os.environ if name.upper().startswith(PREFIX) and name not in known]
    return {
        name: next(iter(difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.0)))
        for name in sorted(unknown)
    }


def values() -> tuple[str, ...]:
    """What choices and builds depend on: ``VARIABLES``, and where home and programs are; not set is empty."""
    names = (*(variable.name for variable in VARIABLES), "XDG_CACHE_HOME", "HOME", "PATH")
    return tuple(os.environ.get(name, "") for name in names)


def search_path() -> list[Path]:
    """``PATH``: the folders in which programs are looked for."""
    return [Path(part) for part in os.environ.get("PATH", "").split(os.pathsep) if part]


def with_programs_of(folder: Path) -> dict[str, str]:
    """All variables for another program, which finds the programs of ``folder`` first."""
    return {**os.environ, "PATH": os.pathsep.join(map(str, [folder, *search_path()]))}


def with_linker_flags(flags: str) -> dict[str, str]:
    """All variables for another program, with ``flags`` behind those of ``LDFLAGS``."""
    return {**os.environ, "LDFLAGS": f"{os.environ.get('LDFLAGS', '')} {flags}".strip()}


def kernel_set() -> str:
    """``KERNELS``: the set of kernels that ``get_kernel_configs()`` gives when asked for none by name."""
    return os.environ.get("KERNELS", "").strip()
