"""Every command that a message or a page recommends can be followed.

Commands are collected from the texts in the sources (what f-strings insert is worked out) and from the pages.
``make X`` must be a target, ``flash-attention …`` must be understood by its parser, a module that is run must
be there, and ``pip install …`` must name a file, this folder, or packages that the project asks for, as
it pins them.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

from flash_helpers.benchmark.peers import PEERS
from flash_helpers.build.nvcc import DISASSEMBLER_PACKAGES, PIP_PACKAGES
from flash_helpers.cli import app

ROOT = Path(__file__).parents[2]
SOURCES = [
    *sorted((ROOT / "flash_attention").rglob("*.py")),
    *sorted((ROOT / "py").rglob("*.py")),
    *sorted((ROOT / "tools").rglob("*.py")),
    *sorted((ROOT / "benchmarks").rglob("*.py")),
]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PLACEHOLDER = "PLACEHOLDER"
WORD = r"(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s`,;()'\"]+)"
FOUND = {
    "pip": re.compile(rf"\bpip install((?: {WORD})+)"),
    "make": re.compile(r"(?:^|`|\$ |run )make ([a-z][\w-]*)(?=[\s`.,:;)]|$)", re.MULTILINE),
    "ours": re.compile(rf"(?:flash-attention|-m flash_attention) ([a-z]+(?: {WORD})*)"),
    "module": re.compile(r"python3? -m (\w+(?:\.\w+)*)"),
}


@dataclass(frozen=True)
class Advice:
    """One command, and where it stands."""

    kind: str
    text: str
    place: str


def texts_of(path: Path) -> Iterator[str]:
    """The texts of a Python file, with what f-strings insert worked out."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(_inserted(part, path) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def _inserted(part: ast.expr, path: Path) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    names = {"PIP_PACKAGES": PIP_PACKAGES, "DISASSEMBLER_PACKAGES": DISASSEMBLER_PACKAGES}
    try:
        return str(eval(ast.unparse(part.value), {}, names))  # type: ignore[attr-defined]
    except Exception:  # a value that only a running program has
        return PLACEHOLDER


def collected() -> list[Advice]:
    """All recommended commands, each once."""
    found: dict[Advice, None] = {}
    for path in [*SOURCES, *PAGES]:
        place = path.relative_to(ROOT).as_posix()
        for text in texts_of(path) if path.suffix == ".py" else [path.read_text(encoding="utf-8")]:
            for kind, pattern in FOUND.items():
                for match in pattern.finditer(text):
                    found[Advice(kind, match[1].strip().rstrip(":"), place)] = None
    return list(found)


PACKAGES_OF_BENCHMARKS = {"ring-flash-attn", "jax[cuda13]", "dew-flash-attn-cu13"}  # peers of one program


def allowed_requirements() -> set[str]:
    """What the project's own files ask pip for, and the packages of its peers."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:dependencies|\w+) = \[([^\]]*)\]", project, re.MULTILINE)
    ours = {entry for text in lists for entry in re.findall(r'"([^"]+)"', text)}
    pinned = {
        line.strip()
        for file in (ROOT / "requirements").glob("*.txt")
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip() and not line.startswith("#")
    }
    peers = {package for peer in PEERS.values() if (package := getattr(peer, "package", None))}
    return ours | pinned | peers | PACKAGES_OF_BENCHMARKS | {"triton"}


def reason_against(advice: Advice) -> str | None:
    """Why a command can't be followed, or None."""
    if advice.kind == "make":
        return None if advice.text in TARGETS else "the Makefile has no such target"
    if advice.kind == "module":
        top, _, inner = advice.text.partition(".")
        if top == "tests":
            place = ROOT.joinpath(top, *inner.split("."))
            found = place.with_suffix(".py").is_file() or (place / "__main__.py").is_file()
            return None if found else "there is no such program among the tests"
        if top not in ("flash_attention", "flash_helpers"):
            known = top in ("pip", "venv", "pytest") or any((ROOT / "tests").rglob(f"{top}*"))
            return None if known else "it is none of the project's modules"
        return None if importlib.util.find_spec(advice.text) else "there is no such module"
    if advice.kind == "ours":
        return _reason_against_ours(advice.text)
    return _reason_against_pip(shlex.split(advice.text))


def _reason_against_ours(text: str) -> str | None:
    name, *arguments = shlex.split(text)
    if name not in COMMANDS:
        return "no such command"
    if PLACEHOLDER in text or not arguments or not arguments[0].startswith(("-", "(", "l", "c")):
        return None  # words of a sentence behind the command's name, or values that only a program has
    try:
        COMMANDS[name].make_context(name, list(arguments))
    except Exception as error:
        return f"{error!r}" if arguments[0].startswith("-") else None
    return None


def _reason_against_pip(words: list[str]) -> str | None:
    words = [word for word in words if not re.fullmatch(r"--[a-z-]+", word)]
    packages: list[str] = []
    understood = False
    while words:
        word = words.pop(0)
        if word == "-r":
            file = words.pop(0) if words else ""
            if not (ROOT / file).is_file():
                return f"there is no file {file}"
        elif word.startswith("flash-attention-kernels"):
            return "the package is not published: name the folder of the sources"
        elif word in allowed_requirements():
            packages.append(word)
        elif not (PLACEHOLDER in word or re.fullmatch(r"\.(\[\w+\])?|dist/\S+|\S+\.whl|-e", word)):
            if understood:
                break  # the sentence goes on
            return f"{word} is nothing that the project asks for, or not as it pins it"
        understood = True
    names = {package.partition("==")[0] for package in packages}
    if "nvidia-cuda-cuobjdump" in names and "nvidia-cuda-nvdisasm" not in names:
        return "cuobjdump needs nvdisasm"
    return None


ADVICE = collected()


def test_something_of_each_kind_is_found() -> None:
    counts = {kind: sum(advice.kind == kind for advice in ADVICE) for kind in FOUND}
    assert all(count >= 5 for count in counts.values()), counts
    places = {advice.place for advice in ADVICE if advice.kind == "pip"}
    helpers = ("build/nvcc.py", "build/sass.py", "report/command.py", "commands/doctor_checks.py")
    assert {f"py/flash_helpers/{name}" for name in helpers} <= places
    assert {"flash_attention/backends/cuda_kernels.py", "README.md"} <= places


@pytest.mark.parametrize("advice", ADVICE, ids=lambda a: f"{a.place}: {a.kind} {a.text}"[:110])
def test_advice_can_be_followed(advice: Advice) -> None:
    assert reason_against(advice) is None, f"{advice.place}: {advice.text}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("pip", "nvidia-cuda-cuobjdump"), ("pip", "nvidia-cuda-cuobjdump==13.2.86"),
        ("pip", "'flash-attention-kernels[report]'"), ("pip", "-r requirements/none.txt"), ("pip", "numpi"),
        ("make", "everything"), ("module", "flash_helpers.nothing"), ("ours", "benchmark"),
        ("ours", "tune --bugdet 0"),
    ],
)  # fmt: skip
def test_advice_that_fails_is_seen(kind: str, text: str) -> None:
    assert reason_against(Advice(kind, text, "here")) is not None


def test_packages_of_messages_are_those_of_the_requirements() -> None:
    text = (ROOT / "requirements" / "cuda-compiler.txt").read_text(encoding="utf-8")
    listed = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert listed == [*PIP_PACKAGES, *DISASSEMBLER_PACKAGES]
