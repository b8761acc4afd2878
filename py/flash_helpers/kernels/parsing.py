"""Reads a configuration back from a kernel's name, as we, a demangler or the compiler print it."""

from __future__ import annotations

from typing import cast

from flash_helpers.kernels.families import DIRECTIONS
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.messages import named_type


def parse_kernel_name_into_config(name: str) -> KernelConfig:
    """The configuration that a kernel's name states.

    Args:
        name: a ``short_form()`` with its sizes, of a configuration or of a kernel (`` | causal`` behind it),
            its words in any order; or a C++ name holding the configuration struct: demangled (as cuobjdump
            and profilers print it, or as ``to_cpp_struct()`` writes it) or mangled.

    Raises:
        ValueError: the name holds no configuration, or says more than one configuration means.
        TypeError: not a text.
    """
    if not isinstance(name, str):
        raise TypeError(f"a kernel's name is a str; given {name!r}, {named_type(name)}")
    surest = max(DIRECTIONS, key=lambda direction: direction.names.claims(name))  # the first among equals
    return cast(KernelConfig, surest.names.read(name))
