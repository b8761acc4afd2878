"""The page on the API has every public name, under the name that programs import."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import reduce
from pathlib import Path

import pytest

import flash_attention

pytestmark = pytest.mark.unit

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
PUBLIC = (
    "flash_attention", "flash_attention.cached", "flash_attention.mods",
    "flash_attention.flash_attn_interface", "flash_attention.flex_attention",
    "flash_attention.integrations.flash_attn_3", "flash_attention.integrations.vllm",
    "flash_attention.integrations.flashinfer",
    "flash_attention.scaled_dot_product", "flash_attention.integrations.transformers",
    "flash_attention.distributed", "flash_attention.distributed.transformers",
    "flash_helpers.kernel_configs", "flash_helpers.build", "flash_attention.errors",
)  # fmt: skip
ENTRIES = {
    heading: path
    for path, heading in re.findall(r"^::: (\S+)\n    options:\n      heading: (\S+)$", PAGE, re.MULTILINE)
}
REFERRED = dict(re.findall(r"^`(\S+)` is \[`\S+`\]\[(\S+)\]\.$", PAGE, re.MULTILINE))


def public_names(module: str) -> list[str]:
    """What a module offers: its ``__all__``, else its own functions."""
    found = importlib.import_module(module)
    own = [n for n, o in vars(found).items() if inspect.isfunction(o) and o.__module__ == module]
    return [name for name in getattr(found, "__all__", own) if not name.startswith("_")]


def resolved(path: str) -> object:
    """The object that the documentation's tool finds at a dotted path: submodules hide names there."""
    module, _, name = path.rpartition(".")
    return reduce(getattr, [name], importlib.import_module(module))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_on_the_page(module: str) -> None:
    names = [f"{module}.{name}" for name in public_names(module)]
    assert names
    assert [name for name in names if name not in ENTRIES and name not in REFERRED] == []


@pytest.mark.parametrize("heading", [*ENTRIES, *REFERRED])
def test_entries_are_the_objects_that_programs_import(heading: str) -> None:
    path = ENTRIES.get(heading) or REFERRED[heading]
    module, _, name = heading.rpartition(".")
    public = getattr(importlib.import_module(module), name)
    assert resolved(path) is public
    assert path in ENTRIES.values()
    if inspect.isclass(public) or inspect.isfunction(public):
        assert public.__module__ == path.rpartition(".")[0], "name the module that defines it"
        assert inspect.getdoc(public)


def test_names_that_were_missing_once_are_there() -> None:
    wanted = {
        "flash_attention.attention", "flash_helpers.kernel_configs.FlashForwardKernelConfig",
        "flash_helpers.kernel_configs.HopperForwardKernelConfig", "flash_helpers.kernel_configs.device_facts",
        "flash_helpers.kernel_configs.parse_kernel_name_into_config",
        "flash_attention.integrations.transformers.register", "flash_helpers.build.KernelCompileError",
    }  # fmt: skip
    assert wanted <= set(ENTRIES)
    assert callable(flash_attention.attention)
