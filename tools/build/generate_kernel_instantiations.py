#!/usr/bin/env python3
"""Writes the translation units of a set of kernels and their table, as a thin command line.

Run from a checkout, or with the package installed:

    python tools/build/generate_kernel_instantiations.py --target 90
    python tools/build/generate_kernel_instantiations.py --target 90 --check  # exit 1 if anything differs
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "py"))

from flash_helpers.build.instantiations import generate  # noqa: E402
from flash_helpers.kernel_configs import ForwardKernel, get_kernels_to_build  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--target", type=int, default=80, help="GPU generation, 80 for sm_80 (default: %(default)s)"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "src" / "generated", help="where (default: %(default)s)"
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if anything would change"
    )
    arguments = parser.parse_args()

    kernels = [ForwardKernel(config) for config in get_kernels_to_build()]
    try:
        changed = generate(kernels, arguments.folder, arguments.target, arguments.check)
    except (ValueError, OSError) as error:
        parser.error(str(error))  # ends with status 2
    for path in changed:
        print(f"{'would change' if arguments.check else 'changed'}: {path}")
    return 1 if arguments.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
