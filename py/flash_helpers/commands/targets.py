"""Reads ``--target``: which GPU generations a command is about."""

from __future__ import annotations

from flash_helpers.kernels.families import FAMILIES


def present_targets() -> list[int]:
    """The generations of the GPUs in this machine; none without a usable GPU (imports torch)."""
    import torch

    if not torch.cuda.is_available():
        return []
    capabilities = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return sorted(10 * major + minor for major, minor in capabilities)


def select_targets(text: str) -> list[int]:
    """The targets that a text names.

    Args:
        text: numbers joined by commas, 90 for sm_90; empty: those of the GPUs in this machine.

    Raises:
        ValueError: no number, a generation that no family runs on, or no GPU to take it from.
    """
    if not text:
        if targets := present_targets():
            return targets
        raise ValueError("there is no GPU to build for; name a generation: --target 80, 86, 89 or 90")
    try:
        targets = sorted({int(part.strip().removeprefix("sm_")) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"target {text!r} is no list of GPU generations such as 80,90") from None
    for target in targets:
        if not any(family.runs_on(target) for family in FAMILIES):
            allowed = "; ".join(f"{family.name}: {family.allowed_targets}" for family in FAMILIES)
            raise ValueError(f"target {target}: no kernel family runs on sm_{target}. {allowed}")
    return targets
