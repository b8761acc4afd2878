"""Reads ``--kernels``: which configurations or kernels a command is about."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial

from flash_helpers.kernel_configs import get_kernel_configs, parse_kernel_name_into_config
from flash_helpers.kernels.direction import Direction
from flash_helpers.kernels.families import DIRECTIONS, direction_of, kernel_of
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.traits import Traits

CAUSAL = {"no": (False,), "yes": (True,), "both": (False, True)}
"""What ``--causal`` may say."""


def select_configs(text: str) -> list[KernelConfig]:
    """The configurations that a text names.

    Args:
        text: short forms joined by ``;``, or a set: ``all``, one family (``ampere``, ``hopper``), a further
            direction of it (``ampere_backward``), ``tune``,
            ``ladder`` (also ``prog``), ``ladder_all`` for every block size, ``hopper_ladder``, block sizes
            ``"B_r,B_c"``, ``none``.

    Raises:
        ValueError: unknown; the message names the closest valid short forms or the sets.
    """
    text = text.strip()
    if text == "none":
        return []
    if not text:
        raise ValueError(f"no kernels are named; valid: short forms joined by ;, {_sets()}")
    if text.startswith("("):
        names = dict.fromkeys(part.strip() for part in text.split(";") if part.strip())
        return [parse_short_form(name) for name in names]
    sets: dict[str, Callable[[], Sequence[KernelConfig]]] = {"all": _built_configs}
    for direction in DIRECTIONS:
        sets |= {direction.label: partial(_built_by, direction), **direction.sets}
    if text in sets:
        return list(sets[text]())
    if text in ("ladder", "ladder_all"):
        text = text.replace("ladder", "prog")
    try:
        return list(get_kernel_configs(text))
    except ValueError:
        sizes = "; ".join(sorted({f"{config.B_r},{config.B_c}" for config in _built_configs()}))
        raise ValueError(
            f"no set of kernels is named {text!r}; valid: {_sets()}, out of {sizes}; or short forms joined "
            "by ;"
        ) from None


def _sets() -> str:
    labels = ", ".join(direction.label for direction in DIRECTIONS)
    own = ", ".join(name for direction in DIRECTIONS for name in direction.sets)
    return f"all, {labels}, tune, ladder, ladder_all, {own}, none, or block sizes B_r,B_c"


def _built_by(direction: Direction) -> list[KernelConfig]:
    return sorted({kernel.config for kernel in direction.built()})


def _built_configs() -> list[KernelConfig]:
    return [config for direction in DIRECTIONS for config in _built_by(direction)]


def select_kernels(text: str, causal: str = "no") -> list[Kernel]:
    """The kernels that a text names.

    Args:
        text: as in ``select_configs``. A short form may name its traits itself: ``(...): ... | causal``.
        causal: ``no``, ``yes`` or ``both``: the traits of what does not name them.

    Raises:
        ValueError: see ``select_configs``; an unknown trait; another word for ``causal``.
    """
    if causal not in CAUSAL:
        raise ValueError(f"causal is {causal!r}; valid: {', '.join(CAUSAL)}")
    masks = CAUSAL[causal]
    if not text.strip().startswith("("):
        return [kernel for config in select_configs(text) for kernel in _with_masks(config, masks)]
    parts = filter(None, map(str.strip, text.split(";")))
    return [kernel for part in parts for kernel in _kernels_of(part, masks)]


def parse_kernel(text: str, causal: bool = False) -> Kernel:
    """One kernel; a short form that names its traits, ``(...): ... | causal``, decides the mask itself.

    Raises:
        ValueError: see ``parse_short_form``; an unknown trait.
    """
    (kernel,) = _kernels_of(text, [causal])
    return kernel


def _kernels_of(part: str, masks: Sequence[bool]) -> list[Kernel]:
    name, separator, words = part.partition("|")
    config = parse_short_form(name.strip())
    if not separator:
        return _with_masks(config, masks)
    return [kernel_of(config, **_parse_traits(words, direction_of(config).kernel.traits_type))]


def _with_masks(config: KernelConfig, masks: Sequence[bool]) -> list[Kernel]:
    return [kernel_of(config, causal=causal) for causal in masks]


def parse_short_form(text: str) -> KernelConfig:
    """One short form; unlike the parser's own message, an error offers the closest valid ones.

    Raises:
        ValueError: the text is no short form, no GPU can run what it states, or it names traits.
    """
    name, separator, traits = text.partition("|")
    if separator:
        raise ValueError(
            f"{traits.strip()!r} stands behind a configuration, where only one is wanted: give "
            f"{name.strip()!r}, and causal by the command's own option"
        )
    try:
        config = parse_kernel_name_into_config(text)
    except ValueError as error:
        raise ValueError(f"{error}. Close to it are:{_near(text)}") from None
    if problem := config.malformed_reason():
        raise ValueError(f"{text!r} is no valid kernel: {problem}. Close to it are:{_near(text)}")
    return config


def _near(text: str) -> str:
    return "".join(f"\n  {name}" for name in closest_short_forms(text))


def closest_short_forms(text: str, count: int = 3) -> Sequence[str]:
    """The short forms of the known kernels most like ``text``, the closest first."""
    names = [config.short_form() for config in select_configs("all")]
    return difflib.get_close_matches(text, names, n=count, cutoff=0.0)


def _parse_traits(text: str, traits_type: type[Traits]) -> dict[str, bool]:
    known = [f.name for f in fields(traits_type)]
    words = [word.strip() for word in text.split("+") if word.strip()]
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"unknown trait {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
    return dict.fromkeys(words, True)
