"""Whether the extension that loads kernels was built from this version of the library."""

from __future__ import annotations

import re
from dataclasses import fields
from types import ModuleType

from flash_helpers.build.sources import include_root
from flash_helpers.content import read_text
from flash_helpers.kernels.cpp_headers import FOLDER, STRUCTS
from flash_helpers.kernels.families import DIRECTIONS

_DIGEST_BITS = 24


def binding_difference(module: ModuleType) -> str | None:
    """How a binding differs from this version of the library, or None."""
    wanted, given = headers_version(), getattr(module, "abi_version", None)
    if wanted != given:
        return f"it speaks interface version {_shown(given)}, the kernels' headers version {_shown(wanted)}"
    configs = [(direction.config, module.config_field_names) for direction in DIRECTIONS]
    traits = {direction.kernel.traits_type: module.traits_field_names for direction in DIRECTIONS}
    for struct, names_of in (*configs, *traits.items()):
        name = struct.__name__
        theirs, ours = list(names_of(name)), [f.name for f in fields(struct)]
        if theirs != ours:
            different = ", ".join(sorted(set(theirs) ^ set(ours)))
            return f"its {name} has other fields: {different or 'in another order'}"
    return None


def headers_version() -> int:
    """The interface version that the headers state, ``kAbiVersion``.

    Raises:
        ValueError: a header does not state its part of it.
    """
    root = include_root()
    number = _stated(read_text(root / "flash_attention.cuh"), r"kInterfaceVersion = (\d+);")
    return int(number) << _DIGEST_BITS | int(
        _stated(read_text(root / FOLDER / STRUCTS), r"kStructsDigest = 0x(\w+);"), 16
    )


def _stated(header: str, pattern: str) -> str:
    match = re.search(r"\b" + pattern, header)
    if match is None:
        raise ValueError(f"the kernels' headers do not state {pattern.split()[0]}: install the package again")
    return match[1]


def _shown(version: object) -> str:
    """The number that is raised by hand, a point, the digest of the structs."""
    if not isinstance(version, int):
        return "unknown"
    return f"{version >> _DIGEST_BITS}.{version % (1 << _DIGEST_BITS):06x}"
