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
KNOW_THE_LIBRARY = ("test", "benchmark", "tune", "run", "commands.doctor", "explain.profiled_call")

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
