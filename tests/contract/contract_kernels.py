"""One good configuration for small problems, compiled for every set of features that contract tests use.

A choice prefers a kernel that is built to a slightly better one that is not, so that tests of automatic
choice compile little beside these.
"""

from __future__ import annotations

from dataclasses import replace

from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, ForwardKernel, ForwardTraits

FEATURES: tuple[tuple[str, ...], ...] = (
    (),
    ("causal",),
    ("window",),
    ("softcap",),
    ("causal", "softcap"),
    ("sinks",),
    ("causal", "softcap", "sinks"),
)
PACKED: tuple[tuple[str, ...], ...] = ((), ("causal",), ("window",), ("softcap",), ("causal", "sinks"))


def kernels() -> list[ForwardKernel]:
    """All of them."""
    traits = [ForwardTraits(**dict.fromkeys(names, True)) for names in FEATURES]
    packed = [ForwardTraits(varlen=True, **dict.fromkeys(names, True)) for names in PACKED]
    found = []
    for dtype in DType:
        for d_head in (64, 128):
            config = FlashForwardKernelConfig(
                dtype, d_head, 64, 64, 4, True, True, True, 0, 2, 2, False, True
            )
            found += [ForwardKernel(config, t) for t in traits]
            found += [ForwardKernel(config, replace(t, padded_head=True)) for t in traits]
            if dtype is DType.FP16:
                found += [ForwardKernel(config, t) for t in packed]
    return found
