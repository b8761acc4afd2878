"""What an import loads, and what it leaves for later: lists of modules in place of times, which vary."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterable

import pytest

import flash_helpers.build
import flash_helpers.kernel_configs
from flash_helpers.lazy import LazySequence, lazy_names

FACADES = (flash_helpers.build, flash_helpers.kernel_configs)

CHOOSING = (
    "flash_helpers.select.select", "flash_helpers.select.prediction", "flash_helpers.model",
    "flash_helpers.results", "sqlite3",
)  # fmt: skip
BUILDING = (
    "flash_helpers.build.cache", "flash_helpers.build.compile", "flash_helpers.build.nvcc",
    "flash_helpers.kernels.cpp_headers", "filelock", "concurrent.futures.thread",
)  # fmt: skip
KERNELS = ("flash_helpers.kernels.ampere", "flash_helpers.kernels.hopper")
TOOLS = (
    "flash_helpers.kernel_configs", "flash_helpers.kernel_selection", "flash_helpers.benchmark",
    "flash_helpers.tune",
    "flash_helpers.explain", "flash_helpers.commands", "rich", "typer", "statistics",
)  # fmt: skip
COMPATIBILITY = ("flash_attention.integrations", "transformers", "torch.nn.attention.bias")
GPU = ("flash_attention.backends.cuda", "flash_attention_kernels", "flash_helpers.kernels.hopper")
LADDERS = (
    "flash_helpers.kernels.ampere.forward.ladder", "flash_helpers.kernels.ampere.forward.sets",
    "flash_helpers.kernels.ampere.forward.direction",
)  # fmt: skip

ATTENTION = """
import torch, flash_attention
q = torch.randn(1, 16, 2, 64, dtype=torch.float16)
flash_attention.attention(q, q, q)
"""
# code to what it must not load beside an imported torch
LEFT_FOR_LATER = {
    "import flash_attention": (*CHOOSING, *BUILDING, *KERNELS, *TOOLS, *COMPATIBILITY, *GPU),
    ATTENTION: (*CHOOSING, *BUILDING, *GPU, "flash_helpers.kernels.ampere.backward"),
    "from flash_helpers.kernel_configs import FlashForwardKernelConfig": (
        "torch", "flash_helpers.kernels.hopper", *LADDERS, *CHOOSING, *BUILDING
    ),
    "import flash_helpers.cli": ("torch", "numpy", *CHOOSING, *BUILDING, *KERNELS),
}  # fmt: skip


def loaded_by(code: str, before: str) -> list[str]:
    """The modules that a program has after ``code`` and had not after ``before``."""
    program = f"import sys\n{before}\nbefore = set(sys.modules)\n{code}\nprint(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def among(modules: Iterable[str], parts: Iterable[str]) -> list[str]:
    """The modules that are one of ``parts``, or below one."""
    return sorted(m for m in modules if any(m == part or m.startswith(f"{part}.") for part in parts))


@pytest.mark.parametrize("code", LEFT_FOR_LATER, ids=lambda code: code.strip().splitlines()[-1])
def test_what_is_not_needed_yet_is_not_loaded(code: str) -> None:
    unwanted = LEFT_FOR_LATER[code]
    loaded = loaded_by(code, "" if "torch" in unwanted else "import torch")
    assert any(module.startswith("flash_") for module in loaded)
    assert among(loaded, unwanted) == []


def test_each_module_that_is_left_for_later_can_be_loaded() -> None:
    """Else a list would name what no longer exists, and hold nothing."""
    ours = {m for parts in LEFT_FOR_LATER.values() for m in parts if m.startswith("flash_helpers")}
    for module in sorted(ours):
        importlib.import_module(module)


# ---------------------------------------------------------------- names that are loaded when they are used
@pytest.mark.parametrize("facade", FACADES, ids=lambda facade: facade.__name__)
def test_a_facade_offers_what_it_shows_to_type_checkers(facade) -> None:
    with open(facade.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(shown) == sorted(facade.__all__)
    assert set(shown) <= set(dir(facade))
    for name, module in shown.items():
        assert getattr(facade, name) is getattr(importlib.import_module(str(module)), name)


def test_an_unknown_name_of_a_facade_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"module 'flash_helpers\.build' has no attribute 'kernels'"):
        flash_helpers.build.kernels  # noqa: B018
    find, listed = lazy_names("json", {"json.decoder": ("JSONDecoder", "decoder")})
    assert find("decoder") is importlib.import_module("json.decoder")
    assert {"decoder", "loads"} <= set(listed())


def test_a_lazy_sequence_is_made_once_when_it_is_asked() -> None:
    made = []
    numbers = LazySequence(lambda: (made.append(1), range(3))[1])
    assert made == []
    assert (list(numbers), numbers[0], numbers[1:], len(numbers)) == ([0, 1, 2], 0, (1, 2), 3)
    assert (2 in numbers, repr(numbers), made) == (True, "(0, 1, 2)", [1])
