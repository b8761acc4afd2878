"""Reads ``--kernels``: which configurations a command is about."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from flash_helpers.configs.kernel import ForwardConfig
from flash_helpers.kernel_configs import (
    get_kernel_configs,
    get_kernels_to_build,
    parse_kernel_name_into_config,
)


def select_configs(text: str) -> list[ForwardConfig]:
    """The configurations that a text names.

    Args:
        text: short forms joined by ``;``, or a set: ``all``, ``tune``, ``ladder`` (also ``prog``),
            block sizes ``"B_r,B_c"``, ``none``.

    Raises:
        ValueError: unknown; the message names the closest valid short forms or the sets.
    """
    text = text.strip()
    if text in ("", "none"):
        return []
    if text.startswith("("):
        return [parse_short_form(part.strip()) for part in text.split(";") if part.strip()]
    return list(
        get_kernel_configs("prog" + text.removeprefix("ladder") if text.startswith("ladder") else text)
    )


def parse_short_form(text: str) -> ForwardConfig:
    """One short form; unlike the parser's own message, an error offers the closest valid ones.

    Raises:
        ValueError: the text is no short form, or no GPU can run what it states.
    """
    try:
        config = parse_kernel_name_into_config(text)
        problem = config.malformed_reason()
    except ValueError:
        problem = "it can't be read"
    if problem is None:
        return config
    near = "".join(f"\n  {name}" for name in closest_short_forms(text))
    raise ValueError(f"{text!r} is no valid kernel: {problem}. Close to it are:{near}")


def closest_short_forms(text: str, count: int = 3) -> Sequence[str]:
    """The short forms of built kernels most like ``text``, the closest first."""
    names = [config.short_form() for config in get_kernels_to_build()]
    return difflib.get_close_matches(text, names, n=count, cutoff=0.0)
