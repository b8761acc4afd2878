#!/usr/bin/env python3
"""Makes the environment that the Makefile's commands run in, and installs what one of them needs.

    python3 tools/environment.py .venv               the library itself, and what it needs to run
    python3 tools/environment.py .venv test models   what these extras of pyproject.toml list

Any Python 3 must be able to read this file, since it says when one is too old. Nothing is installed by a
Python that the project can't use: that is said first. An environment that such a Python made is made anew.
While pip works, a line says so every ten seconds; its output is shown if it fails.
"""

import os
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HEARTBEAT_S = 10
WHAT = {
    "test": "what the tests need",
    "models": "models for the tests",
    "lint": "linters and type checker",
    "docs": "what builds the documentation",
}


def supported():
    """((3, 10), (3, 14)): the first Python that is supported, and the first that is not any more."""
    with open(os.path.join(ROOT, "pyproject.toml")) as file:
        found = re.search(r'requires-python = ">=(\d+)\.(\d+),<(\d+)\.(\d+)"', file.read())
    first, end = found.group(1, 2), found.group(3, 4)
    return tuple(map(int, first)), tuple(map(int, end))


def reason_against(version):
    """Why a Python of this (major, minor) can't be used, or None."""
    first, end = supported()
    if first <= tuple(version[:2]) < end:
        return None
    return "Python {0}.{1} is too {2}: this project needs Python {3}.{4} to {5}.{6}".format(
        version[0], version[1], "old" if tuple(version[:2]) < first else "new", first[0], first[1],
        end[0], end[1] - 1,
    )  # fmt: skip


def version_of(python):
    """(major, minor) of an interpreter, or None where it does not run."""
    code = "import sys; print('%d %d' % sys.version_info[:2])"
    try:
        shown = subprocess.check_output([python, "-c", code], stderr=subprocess.STDOUT)
        return tuple(map(int, shown.split()))
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None


def make_environment(folder):
    """Makes the environment, or keeps the one that is there if its Python can be used."""
    python = os.path.join(folder, "bin", "python")
    if os.path.lexists(folder):
        version = version_of(python)
        reason = reason_against(version) if version else "its Python does not run"
        if reason is None:
            if version != tuple(sys.version_info[:2]):
                print("{0} keeps its Python {1}.{2}; for another one: make clean".format(folder, *version))
            return python
        print("{0} is made anew: {1}".format(folder, reason))
        shutil.rmtree(folder)
    print("making {0} with {1}, Python {2}.{3}".format(folder, sys.executable, *sys.version_info[:2]))
    sys.stdout.flush()
    subprocess.check_call([sys.executable, "-m", "venv", folder])
    return python


def install(python, what, arguments):
    """pip install, with a sign of life."""
    print("installing {0}: downloads may take minutes the first time".format(what))
    sys.stdout.flush()
    log = os.path.join(os.path.dirname(os.path.dirname(python)), "install.log")
    begin = shown = time.time()
    with open(log, "w") as file:
        command = [python, "-m", "pip", "install", "--disable-pip-version-check"] + arguments
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(0.2)
            if time.time() - shown >= HEARTBEAT_S:
                shown = time.time()
                print("  ... still installing, {0:.0f} s".format(shown - begin))
                sys.stdout.flush()
    if process.returncode:
        with open(log) as file:
            sys.stdout.write("".join(file.readlines()[-30:]))
        sys.exit("pip failed with status {0}; its whole output: {1}".format(process.returncode, log))
    print("installed after {0:.0f} s".format(time.time() - begin))


def requirements_of(extra):
    """What pyproject.toml lists for an extra, in one line."""
    with open(os.path.join(ROOT, "pyproject.toml")) as file:
        found = re.search(r"(?m)^{0} = \[(.*)\]$".format(re.escape(extra)), file.read())
    if found is None:
        sys.exit("error: pyproject.toml has no extra {0!r}".format(extra))
    return re.findall(r'"([^"]+)"', found.group(1))


def main(folder, wanted):
    """Checks this Python, makes the environment, installs the library, or what extras and lists name.

    Args:
        folder: of the environment.
        wanted: extras of the package, or files with requirements; none: the library itself.
    """
    reason = reason_against(sys.version_info)
    if reason is not None:
        end = supported()[1]
        sys.exit(
            "error: {0}. It is {1}; install another one and name it: make run PYTHON=python{2}.{3}".format(
                reason, sys.executable, end[0], end[1] - 1
            )
        )
    python = make_environment(folder)
    if not wanted:
        install(python, "the library and torch", ["-c", "constraints.txt", "-e", "."])
    for name in wanted:
        named = ["-r", name] if name.endswith(".txt") else ["-c", "constraints.txt"] + requirements_of(name)
        install(python, WHAT.get(name, name), named)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2:])
