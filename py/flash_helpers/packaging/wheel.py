"""Builds a wheel: ``python -m flash_helpers.packaging.wheel --out dist --target 80 --target 90``.

Every wheel holds the sources of the kernels. With targets it also brings compiled what ``attention`` chooses
on them for common problems (``wheel_sets``), which then run without any compiler. The wheel is built in a
copy of the checkout, which stays as it is.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flash_helpers import environment
from flash_helpers.build import BuildError, build_kernels
from flash_helpers.build.cache import KernelCache
from flash_helpers.build.store import STORE
from flash_helpers.console.writable import NotWritableError, check_folder
from flash_helpers.kernel_selection import select_kernels
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.packaging.wheel_sets import NAMES, SETS, wheel_kernels
from flash_helpers.packaging.wheel_tag import place_wheel

CHECKOUT = Path(__file__).resolve().parents[3]
INPUTS = (
    "flash_attention",
    "py",
    "src",
    "requirements",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)
NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so", "generated", "prebuilt")


def build_wheel(out: Path, prebuilt: dict[int, list[Kernel]]) -> Path:
    """Builds one wheel into ``out``.

    Args:
        prebuilt: the kernels that the wheel brings compiled, by GPU generation; empty: only sources.

    Returns:
        The wheel.

    Raises:
        BuildError: a kernel or the binding could not be compiled.
        subprocess.CalledProcessError: pip could not build the wheel; its output is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy, built = Path(folder) / "source", Path(folder) / "wheel"
        copy_checkout(copy)
        if prebuilt:
            _add_prebuilt(copy / "py" / "flash_helpers" / "prebuilt", prebuilt)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        # The C++ library is linked in: an older one may be loaded before the binding is.
        variables = environment.with_linker_flags("-static-libstdc++")
        subprocess.run([*command, "-w", built, copy], check=True, env=variables)
        (wheel,) = built.glob("*.whl")
        return place_wheel(wheel, out)


def copy_checkout(folder: Path) -> None:
    """Makes ``folder`` with all that an install reads, so that building leaves nothing in the checkout."""
    folder.mkdir()
    for name in INPUTS:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=NOT_COPIED)
        else:
            shutil.copy(source, folder)


def _add_prebuilt(folder: Path, prebuilt: dict[int, list[Kernel]]) -> None:
    """Compiles through a cache in ``folder``, of which only the libraries and their index stay."""
    for target, kernels in prebuilt.items():
        build_kernels(kernels, [target], cache=KernelCache(folder))
    for part in ("libraries", "index"):
        shutil.move(folder / STORE / part, folder / part)
    shutil.rmtree(folder / STORE)


def _kernels(target: int, sets: str | None, kernels: str | None) -> list[Kernel]:
    if kernels is not None:
        return select_kernels(kernels)
    return wheel_kernels(target, NAMES if sets is None else sets.split(","))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_helpers.packaging.wheel", description="Build a wheel."
    )
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder for the wheel (default: dist)")
    parser.add_argument(
        "--target",
        type=int,
        action="append",
        default=[],
        help="compile for it, 80 for sm_80; may be given several times (default: sources alone)",
    )
    parser.add_argument(
        "--sets",
        metavar="NAME,NAME",
        help="what is compiled (default: all of it). " + ". ".join(f"{s.name}: {s.reason}" for s in SETS),
    )
    parser.add_argument("--kernels", help="compile these instead, as kernel_selection names them")
    options = parser.parse_args(arguments)
    if options.sets is not None and options.kernels is not None:
        parser.error("--sets and --kernels both say what is compiled: give one of them")
    if (options.sets is not None or options.kernels is not None) and not options.target:
        parser.error(
            "--sets and --kernels say what is compiled, but not for which GPUs: add --target, e.g. 80"
        )
    begin = time.perf_counter()
    try:
        check_folder(options.out, "--out")
        prebuilt = {target: _kernels(target, options.sets, options.kernels) for target in options.target}
        wheel = build_wheel(options.out, prebuilt)
    except (ValueError, NotWritableError) as error:
        parser.error(str(error))
    except BuildError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{parser.prog}: pip could not build the wheel; it says why above: {error}", file=sys.stderr)
        return 1
    compiled = ", ".join(f"{len(kernels)} kernels for sm_{target}" for target, kernels in prebuilt.items())
    size, seconds = wheel.stat().st_size / 1e6, time.perf_counter() - begin
    print(f"{wheel}: {size:.1f} MB in {seconds:.0f} s; compiled: {compiled or 'nothing, sources alone'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
