"""The kernels that tests will need on a GPU, named and compiled on a machine without one.

python -m tests.ahead ask FOLDER -- -m pytest tests/gpu   writes down which: runs Python with what follows --
python -m tests.ahead build FOLDER … --into CACHE         compiles them into a cache folder, to be carried
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_helpers.build import BuildError
from flash_helpers.kernels.device_facts import device_facts
from tests.ahead import outcomes, recorded
from tests.ahead.building import build_all
from tests.ahead.pretending import DEVICE, FOLDER, GUARD, LIMIT, compile_guard

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def ask(folder: Path, device: str, limit: float, command: list[str]) -> int:
    """Runs Python with a command line, on a GPU that is not there.

    Returns:
        how Python ended; tests that fail fail here too, which is told.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    compile_guard(folder / GUARD)
    before = os.environ.get("PYTHONPATH", "")
    paths = [str(HERE / "site"), str(ROOT), str(ROOT / "py"), *([before] if before else [])]
    variables = os.environ | {
        FOLDER: str(folder.resolve()),
        DEVICE: device,
        LIMIT: str(limit),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTEST_PLUGINS": "tests.ahead.outcomes",
    }
    code = subprocess.run([sys.executable, *command], env=variables, check=False).returncode
    tests = outcomes.read(folder)
    counts = {
        kind: [name for name, (end, _) in tests.items() if end == kind]
        for kind in ("passed", "skipped", "failed")
    }
    for name in counts["failed"]:
        print(f"ended early: {name}: {tests[name][1][:200]}")
    print(
        f"{len(recorded.read(folder))} kernels; {len(counts['passed'])} tests ran to their end, "
        f"{len(counts['skipped'])} were skipped, {len(counts['failed'])} ended early and may need more"
    )
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.ahead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("ask", help="run tests or a program, and write down its kernels")
    asking.add_argument("folder", type=Path, help="where to write")
    asking.add_argument("--device", default="H200", help="the GPU: a name of KNOWN_DEVICES")
    asking.add_argument("--limit", type=float, default=60.0, help="seconds after which a test is ended")
    asking.add_argument("python", nargs="+", help="arguments of Python, after --")
    building = commands.add_parser("build", help="compile what was written down")
    building.add_argument("folder", type=Path, nargs="+", help="what ask has written, the most wanted first")
    building.add_argument("--into", type=Path, required=True, help="the cache folder")
    building.add_argument("--device", default="H200", help="as of ask")
    building.add_argument("--jobs", type=int, default=None, help="compilations at the same time")
    building.add_argument("--seconds", type=float, default=float("inf"), help="begin no kernel after that")
    given = parser.parse_args(arguments)
    try:
        device_facts(given.device)
        if given.command == "ask":
            return ask(given.folder, given.device, given.limit, given.python)
        return build_all(given.folder, given.into, given.device, given.jobs, given.seconds)
    except (BuildError, OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
