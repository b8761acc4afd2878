"""Whether the extension that loads kernels was built from this version of the library."""

from __future__ import annotations

import re
from dataclasses import fields
from types import ModuleType

from flash_helpers.build.sources import include_root
from flash_helpers.content import read_text
from flash_helpers.kernels.cpp_headers import STRUCTS, headers
from flash_helpers.kernels.families import DIRECTIONS


def binding_difference(module: ModuleType) -> str | None:
    """How a binding differs from this version of the library, or None."""
    header = read_text(include_root() / "flash_attention.cuh")
    version = re.search(r"\bkInterfaceVersion = (\d+);", header)
    digest = re.search(r"\bkStructsDigest = 0x([0-9a-f]+);", headers()[STRUCTS])
    wanted = version and digest and int(version[1]) << 24 | int(digest[1], 16)  # kAbiVersion
    given = getattr(module, "abi_version", None)
    if wanted != given:
        return f"it speaks interface version {given}, the kernels' headers version {wanted}"
    for direction in DIRECTIONS:
        name = direction.config.__name__
        theirs, ours = list(module.config_field_names(name)), [f.name for f in fields(direction.config)]
        if theirs != ours:
            different = ", ".join(sorted(set(theirs) ^ set(ours)))
            return f"its {name} has other fields: {different or 'in another order'}"
    return None
