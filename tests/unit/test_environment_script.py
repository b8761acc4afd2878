"""tools/environment.py, by which the Makefile installs: what it says, and what it asks pip for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "environment.py"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, whose pip only notes what it was asked for."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    import environment as module

    monkeypatch.delitem(sys.modules, "environment")
    return module


def run_as(version: tuple[int, int, int], folder: Path, *wanted: str) -> subprocess.CompletedProcess[str]:
    """The script, run by what takes itself for another Python."""
    arguments = ["environment.py", str(folder), *wanted]
    program = (
        f"import runpy, sys; sys.version_info = {(*version, 'final', 0)!r}; sys.argv = {arguments!r}; "
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


@pytest.mark.parametrize(("version", "word"), [((3, 8, 18), "old"), ((3, 9, 2), "old"), ((3, 14, 0), "new")])
def test_a_python_that_cannot_be_used_is_said_before_anything(
    version: tuple[int, int, int], word: str, tmp_path: Path
) -> None:
    result = run_as(version, tmp_path / "venv")
    assert result.returncode == 1
    assert (
        f"error: Python 3.{version[1]} is too {word}: this project needs Python 3.10 to 3.13" in result.stderr
    )
    assert "make run PYTHON=python3.13" in result.stderr
    assert not (tmp_path / "venv").exists()
    assert "pip" not in result.stdout + result.stderr


def test_any_python_3_can_read_the_script() -> None:
    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 4))
    assert "f'" not in re.sub(r"[\w]f'", "", SCRIPT.read_text(encoding="utf-8"))


def test_an_environment_of_a_wrong_python_is_made_anew(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[list[str]] = []
    monkeypatch.setattr(script.subprocess, "check_call", made.append)
    for answer, told in (("echo 3 9", "Python 3.9 is too old"), ("exit 1", "its Python does not run")):
        python = tmp_path / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\n{answer}\n")
        python.chmod(0o755)
        script.make_environment(str(tmp_path / "venv"))
        assert not python.exists()
        assert f"venv is made anew: {told}" in capsys.readouterr().out
    assert [command[1:] for command in made] == [["-m", "venv", str(tmp_path / "venv")]] * 2


def test_a_good_environment_is_kept(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script.subprocess, "check_call", lambda command: pytest.fail("made anew"))
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    assert script.make_environment(str(tmp_path / "venv")) == str(tmp_path / "venv" / "bin" / "python")


def test_each_command_installs_only_what_it_needs(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(script, "make_environment", lambda folder: "python")
    monkeypatch.setattr(script, "install", lambda python, what, arguments: asked.append(arguments))
    script.main("venv", [])
    assert asked.pop() == ["-c", "constraints.txt", "-e", "."]
    recipe = r"^\$\(VENV\)/(\.\w+):[^\n]*\n(?:\t[^\n]*\n)*?\t[^\n]*environment\.py \$\(VENV\)([^\n]*)"
    recipes = re.findall(recipe, MAKEFILE, re.MULTILINE)
    wanted = {stamp: words.split() for stamp, words in recipes}
    assert wanted[".base"] == []
    assert not {".lint", ".test", ".docs"} & set(re.search(r"^run: (.*)$", MAKEFILE, re.M)[1].split())  # type: ignore[index]
    for stamp, extras in wanted.items():
        asked.clear()
        script.main("venv", extras)
        assert asked, stamp
    script.main("venv", ["lint"])
    assert asked[-1] == ["-c", "constraints.txt", "ruff", "mypy", "clang-format"]
    with pytest.raises(SystemExit, match="has no extra 'nothing'"):
        script.main("venv", ["nothing"])


def test_installing_says_so_and_shows_what_pip_said_when_it_failed(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text("#!/bin/sh\nsleep 1\necho it has no such version\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(script, "HEARTBEAT_S", 0.3)
    with pytest.raises(SystemExit, match=r"pip failed with status 3; its whole output: .*install\.log"):
        script.install(str(python), "something", ["-e", "."])
    shown = capsys.readouterr().out
    assert shown.startswith("installing something: ")
    assert "still installing" in shown
    assert "it has no such version" in shown


# ---------------------------------------------------------------- metadata
def test_the_address_of_the_repository_stands_in_one_place() -> None:
    (repository,) = re.findall(r'^Repository = "(.+)"$', PROJECT, re.MULTILINE)
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert f"\nrepo_url: {repository}\n" in site
    (docs,) = re.findall(r'^Documentation = "(.+)"$', PROJECT, re.MULTILINE)
    assert repository.startswith("https://")
    assert docs.startswith("https://")


def test_the_extras_of_the_environment_are_those_of_the_package(script: Any) -> None:
    extras = PROJECT.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    names = set(re.findall(r"^(\w+) = ", extras, re.MULTILINE))
    assert {"test", "models", "lint", "docs"} <= names
    assert set(script.WHAT) <= names
    for name in names:
        assert script.requirements_of(name)
