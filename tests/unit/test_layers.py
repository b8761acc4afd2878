"""Who may import whom: the arrows of DESIGN.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "py" / "flash_helpers"

NEED_TORCH = (  # folders and modules of flash_helpers that compute, measure, or read measurements
    "test", "benchmark", "run", "tune.halving", "tune.session", "tune.tuner",
)  # fmt: skip
KNOW_THE_LIBRARY = ("test", "benchmark", "tune", "run", "commands.doctor_checks", "explain.profiled_call")

IMPORT_EACH_WITHOUT_TORCH = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("torch")

sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    for loaded in [module for module in sys.modules if module.startswith("flash_")]:
        del sys.modules[loaded]  # what another one has loaded does not count
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(name, error)
"""


def modules() -> dict[str, Path]:
    """Every module of flash_helpers, by its name below the package."""
    named = {".".join(p.relative_to(HELPERS).with_suffix("").parts): p for p in HELPERS.rglob("*.py")}
    return {name.removesuffix("__init__").rstrip("."): path for name, path in sorted(named.items())}


def drawing() -> dict[str, list[list[str]]]:
    """Package to its lines of parts, from top to bottom, as DESIGN.md draws them."""
    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8").split("```layers\n")[1].split("```")[0]
    found: dict[str, list[list[str]]] = {}
    package = ""
    for line in filter(None, text.splitlines()):
        if line.startswith(" "):
            found[package].append(line.split())
        else:
            package = line
            found[package] = []
    return found


FOLDERS = {"flash_helpers": HELPERS, "flash_attention": ROOT / "flash_attention"}


def imports_of(package: str, folder: Path) -> dict[str, set[str]]:
    """Every module of a package to the modules of that package that it imports, anywhere in it."""
    files = {}
    for path in folder.rglob("*.py"):
        name = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
        files[name.removesuffix(".__init__")] = path
    found = {}
    for name, path in files.items():
        wanted = imported(path)
        found[name] = {m if m in files else m.rpartition(".")[0] for m in wanted} & set(files) - {name}
    return found


def upward(arrows: dict[str, set[str]], lines: list[list[str]]) -> list[str]:
    """Imports of what does not stand on a lower line, as text."""
    height = {part: -number for number, parts in enumerate(lines) for part in parts}
    wrong = []
    for name, wanted in arrows.items():
        for other in wanted:
            begin, end = name.split(".")[1:2], other.split(".")[1:2]
            if begin and end and begin != end and height[end[0]] >= height[begin[0]]:
                wrong.append(f"{name} imports {other}")
    return sorted(wrong)


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle; empty where there is none."""
    left = dict(arrows)
    while free := [name for name, wanted in left.items() if not wanted & set(left)]:
        for name in free:
            del left[name]
    return sorted(left)


def within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def imported(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_helpers_import_torch_only_where_they_compute_or_measure() -> None:
    names = [f"flash_helpers.{name}".rstrip(".") for name in modules() if not within(name, NEED_TORCH)]
    command = [sys.executable, "-c", IMPORT_EACH_WITHOUT_TORCH, *names]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == ""


def test_helpers_know_the_library_only_where_they_measure_or_check_it() -> None:
    users = {
        n
        for n, path in modules().items()
        if any(m.startswith("flash_attention.") or m == "flash_attention" for m in imported(path))
    }
    assert {name for name in users if not within(name, KNOW_THE_LIBRARY)} == set()
    assert all(any(within(name, (place,)) for name in users) for place in KNOW_THE_LIBRARY)


@pytest.mark.parametrize("package", FOLDERS)
def test_packages_import_downwards_only(package: str) -> None:
    arrows, lines = imports_of(package, FOLDERS[package]), drawing()[package]
    parts = {name.split(".")[1] for name in arrows if "." in name}
    assert sorted(part for line in lines for part in line) == sorted(parts)  # each is drawn, once
    assert upward(arrows, lines) == []


@pytest.mark.parametrize("package", FOLDERS)
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    arrows = imports_of(package, FOLDERS[package])
    assert len(arrows) > 20
    assert circle(arrows) == []


def test_an_upward_arrow_and_a_circle_are_seen() -> None:
    arrows = {"p.a.x": {"p.b.y"}, "p.b.y": {"p.b.z"}, "p.b.z": {"p.b.y"}, "p.a.w": set()}
    assert upward(arrows, [["a"], ["b"]]) == []
    assert upward(arrows, [["b"], ["a"]]) == ["p.a.x imports p.b.y"]
    assert upward(arrows, [["a", "b"]]) == ["p.a.x imports p.b.y"]
    assert circle(arrows) == ["p.a.x", "p.b.y", "p.b.z"]
    assert circle({**arrows, "p.b.z": set()}) == []


@pytest.mark.parametrize(("family", "other"), [("ampere", "hopper"), ("hopper", "ampere")])
def test_families_do_not_import_each_other(family: str, other: str) -> None:
    folder = HELPERS / "kernels" / family
    files = list(folder.rglob("*.py"))
    assert len(files) > 5
    wrong = [p.name for p in files if any(f"kernels.{other}." in module for module in imported(p))]
    assert wrong == []


def test_environment_variables_are_read_in_one_module() -> None:
    read = re.compile(r"os\.environ(?:\.get|\[)|os\.getenv")
    files = [*HELPERS.rglob("*.py"), *(ROOT / "flash_attention").rglob("*.py")]
    readers = {path for path in files if read.search(path.read_text(encoding="utf-8"))}
    assert readers == {HELPERS / "environment.py"}


@pytest.mark.parametrize(("backend", "other"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda_kernels", "cpu")])
def test_backends_do_not_import_each_other(backend: str, other: str) -> None:
    path = ROOT / "flash_attention" / "backends" / f"{backend}.py"
    assert not any(re.search(rf"backends\.{other}\b", module) for module in imported(path))


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("ampere", "hopper|tma"),
        ("hopper", "ampere"),
        ("tma", "ampere|hopper"),
        ("common", "ampere|hopper|tma"),
    ],
)
def test_families_share_only_what_knows_none_of_them(folder: str, others: str) -> None:
    headers = list((ROOT / "src" / "include" / folder).rglob("*.cuh"))
    assert headers
    include = re.compile(rf'#include "(?:{others})/')
    assert [h.name for h in headers if include.search(h.read_text(encoding="utf-8"))] == []


def test_shared_headers_name_no_family() -> None:
    headers = [h for folder in ("common", "tma") for h in (ROOT / "src" / "include" / folder).glob("*.cuh")]
    assert headers
    family = re.compile(r"HopperForwardKernelConfig|FlashForwardKernelConfig|flash::(?:hopper|ampere)\b")
    assert [h.name for h in headers if family.search(h.read_text(encoding="utf-8"))] == []


def test_the_binding_knows_neither_cuda_nor_torch() -> None:
    sources = [ROOT / "src" / "flash_attention.cpp", *(ROOT / "src" / "binding").glob("*.hpp")]
    assert len(sources) > 1
    for source in sources:
        assert not re.findall(r'#include [<"](?:cuda|torch|ATen|c10)', source.read_text(encoding="utf-8"))
