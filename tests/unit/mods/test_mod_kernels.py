"""Ampere forward kernels with functions of the user's: they need no spills, and compute what the CPU does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gallery import GALLERY, HEADS, SEQ, alibi, causal, documents, softcap, t5_buckets

import flash_attention
from flash_attention.mods.tracing import trace
from flash_helpers import build
from flash_helpers.build import KernelCache, KernelCompileError
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, ForwardKernel
from flash_helpers.kernels.softmax import SoftmaxReference
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.test.reference import reference

# A warp has 16 rows, and at d 128 blocks of 64 keys: beside larger S and O, some mods spill.
CONFIGS = {
    64: FlashForwardKernelConfig(DType.BF16, 64, 128, 128, 8, True, True, True, 0, 2, 2, False, True),
    128: FlashForwardKernelConfig(DType.BF16, 128, 64, 64, 4, True, True, True, 0, 2, 2, False, True),
}
BIAS = torch.randn(1, HEADS, SEQ, SEQ, generator=torch.Generator().manual_seed(3)).bfloat16()
TABLE = torch.randn(HEADS, 16, generator=torch.Generator().manual_seed(3))
ENDS = torch.tensor([0, 10, 30, SEQ])


def dense_bias(bias):
    return lambda s, b, h, q, k: s + bias[0, h, q, k]


def mods_on(device: str) -> dict[str, dict[str, object]]:
    """Functions whose tensors are on a device, by name."""
    document = torch.repeat_interleave(torch.arange(3), ENDS.diff()).to(device)
    return {
        "no change": {"score_mod": lambda s, b, h, q, k: s},
        "causal": {"mask_mod": causal},
        "ALiBi": {"score_mod": alibi(HEADS)},
        "documents": {"mask_mod": lambda b, h, q, k: (document[q] == document[k]) & (q >= k)},
        "soft cap": {"score_mod": softcap(2.0)},
        "dense bias": {"score_mod": dense_bias(BIAS.to(device))},
        "T5 buckets": {"score_mod": t5_buckets(TABLE.to(device))},
        "both": {"score_mod": alibi(HEADS), "mask_mod": GALLERY["block diffusion"][1]},
        "heads and items": {
            "score_mod": lambda s, b, h, q, k: s * (1.0 + 0.1 * h) - 0.05 * b * (k % 7),
            "mask_mod": lambda b, h, q, k: (q + k + b + h) % 3 != 0,
        },
    }


@pytest.mark.compile
@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("d", CONFIGS)
def test_no_kernel_spills(tmp_path: Path, d: int, target: int) -> None:
    mods = mods_on("cpu")
    mods |= {"documents of the gallery": {"mask_mod": documents(causal, ENDS)}}
    chosen = mods if target == 80 else {name: mods[name] for name in ("documents", "dense bias")}
    kernels = [ForwardKernel(CONFIGS[d], mod=trace(**functions).mod) for functions in chosen.values()]
    built = build.build_library(kernels, target, cache=KernelCache(tmp_path))
    assert len(built.kernels) == len(chosen)
    spilled = {compiled.kernel.mod: compiled.spill_bytes for compiled in built.kernels}
    assert spilled.keys() == {kernel.mod for kernel in kernels}
    assert not any(spilled.values())


@pytest.mark.compile
@pytest.mark.parametrize(
    ("config", "traits", "why"),
    [
        (CONFIGS[64], ForwardTraits(softcap=True), "a soft cap is a part of it"),
        (
            replace(CONFIGS[64], softmax_reference=SoftmaxReference.LAGGED),
            ForwardTraits(),
            "a mod may hide any key",
        ),
    ],
)
def test_what_no_kernel_with_a_mod_can_be(tmp_path: Path, config, traits, why: str) -> None:
    kernel = ForwardKernel(config, traits, trace(None, causal).mod)
    with pytest.raises(KernelCompileError) as caught:
        build.build_library([kernel], 80, cache=KernelCache(tmp_path))
    assert why in Path(caught.value.log).read_text(encoding="utf-8")


@pytest.mark.gpu
@pytest.mark.parametrize("name", mods_on("cpu"))
@pytest.mark.parametrize("d", CONFIGS)
def test_the_gpu_computes_what_the_cpu_computes(d: int, name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(2, n, h, d, generator=generator).bfloat16() for n, h in ((SEQ, HEADS), (SEQ, 2), (SEQ, 2))
    )
    on_gpu = [x.cuda() for x in (q, k, v)]
    found = flash_attention.attention(*on_gpu, config=CONFIGS[d], return_lse=True, **mods_on("cuda")[name])
    on_cpu = flash_attention.attention(q, k, v, return_lse=True, **mods_on("cpu")[name])
    expected = reference(q, k, v, **mods_on("cpu")[name])
    for x, own, exact in zip(found, on_cpu, expected, strict=True):
        torch.testing.assert_close(x.cpu(), own, rtol=1.6e-2, atol=1.6e-2)
        torch.testing.assert_close(x.cpu().double(), exact, rtol=1.6e-2, atol=1.6e-2)
