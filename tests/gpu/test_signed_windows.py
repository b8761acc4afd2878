"""Windows whose limits have either sign, on kernels of both families, against the float64 reference.

Every tile shape, lengths that differ both ways, packed sequences, caches, pages and split keys. Keys before
the window of the first query are NaN (``trait_calls``): those of a window behind all keys are all NaN, and
the output is 0.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from trait_calls import Call, Case

from flash_attention import attention, last_kernel
from flash_helpers import build
from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    SoftmaxReference,
    choose_hopper_kernel,
)
from flash_helpers.test.utils import reference

FP16, BF16 = DType.FP16, DType.BF16
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

WINDOWS = (
    (-1, 5), (9, -2), (-3, None), (None, -2), (-40, 130), (200, -70), (None, -150), (-150, None), (0, 0),
    (None, 300), (300, None), (-2, 1), (None, -5000), (-5000, None), (-5000, 6000), (6000, -5000),
    (None, -(2**30)), (-(2**30), None), (2**30 - 1, -64), (-64, 2**30 - 1),
)  # fmt: skip
LENGTHS = ((300, 300), (129, 517), (517, 129), (1, 200), (65, 64), (64, 1))
RAGGED = ((100, 1, 0, 65, 128, 300), (100, 90, 33, 0, 257, 64))


def ampere(dtype: DType, d_head: int, B_r: int, B_c: int, traits: str, **changes: object) -> ForwardKernel:
    """A kernel with the traits that are named, without stages and barriers."""
    config = FlashForwardKernelConfig(
        dtype, d_head, B_r, B_c, 4, True, True, True, 0 if B_r == 64 else 2, 2, 2, False, True
    )
    on = ForwardTraits(**dict.fromkeys(traits.split(), True))
    return ForwardKernel(replace(config, **changes), on)


def hopper(dtype: DType, d_head: int, seq_len: int, traits: str, **changes: object) -> ForwardKernel:
    """The kernel chosen for so many queries, with the traits that are named."""
    on = ForwardTraits(**dict.fromkeys(traits.split(), True))
    chosen, _ = choose_hopper_kernel(dtype, d_head, False, seq_len, traits=on)
    return replace(chosen, config=replace(chosen.config, **changes))


RING = {
    "kv_stages": 2, "mbarrier": True, "Q_mma_load_K_tiles": 1, "K_mma_load_K_tiles": 1,
    "V_mma_load_K_tiles": 1, "fragments_ahead": 1,
}  # fmt: skip
DENSE = [
    ampere(BF16, 128, 64, 64, "window"),
    ampere(FP16, 64, 128, 32, "window", softmax_reference=SoftmaxReference.LAGGED, **RING),
    ampere(BF16, 128, 128, 64, "window", softmax_reference=SoftmaxReference.ANCHORED, **RING),
    ampere(FP16, 64, 64, 128, "window sinks", optimized_softmax=False),
    ampere(BF16, 64, 64, 64, "causal window"),
    ampere(FP16, 128, 64, 64, "window split", kv_stages=3),
    ampere(BF16, 64, 64, 32, "window padded_head"),
]
RAGGED_KERNELS = [
    ampere(BF16, 128, 64, 64, "window varlen"),
    ampere(FP16, 64, 128, 32, "window varlen sinks", softmax_reference=SoftmaxReference.LAGGED, **RING),
    ampere(BF16, 64, 64, 64, "window varlen split"),
    ampere(FP16, 128, 64, 32, "window varlen split paged"),
    ampere(BF16, 64, 64, 64, "window varlen paged"),
]
if ON_HOPPER:
    DENSE += [
        hopper(BF16, 64, 1024, "window"),  # 256 x 64, four warpgroups
        hopper(FP16, 64, 9000, "window"),  # 192 x 128
        hopper(BF16, 96, 4096, "window"),  # 192 x 96
        hopper(FP16, 128, 512, "window sinks"),  # the next item with the last P V
        hopper(BF16, 128, 4096, "window"),  # after it
        hopper(BF16, 192, 1024, "window"),
        hopper(FP16, 192, 4096, "window"),  # one Q slot
        hopper(BF16, 256, 4096, "window"),
        hopper(BF16, 256, 9000, "window softcap"),  # 128 x 80
        hopper(FP16, 128, 512, "causal window"),
        hopper(BF16, 128, 512, "window", dynamic_schedule=False),
        hopper(BF16, 128, 1, "window split"),
        hopper(FP16, 64, 512, "window split"),
        hopper(BF16, 128, 4096, "window padded_head"),
    ]
    RAGGED_KERNELS += [
        hopper(BF16, 64, 512, "window varlen"),
        hopper(FP16, 128, 512, "window varlen sinks"),
        hopper(BF16, 256, 512, "window varlen"),
        hopper(BF16, 128, 1, "window varlen split"),
        hopper(FP16, 128, 1, "window varlen split paged"),
        hopper(BF16, 64, 512, "window varlen paged"),
    ]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    major, minor = torch.cuda.get_device_capability()
    build.build_kernels([*DENSE, *RAGGED_KERNELS], [10 * major + minor])


def _sizes(kernel: ForwardKernel) -> dict[str, int]:
    """Columns of the tensors, less than the kernel's where it is padded; parts of the keys."""
    d = kernel.config.d_head - 24 if kernel.traits.padded_head else 0
    return {"d": d, "parts": 3 if kernel.traits.split else 0}


@pytest.mark.parametrize("kernel", DENSE, ids=ForwardKernel.short_form)
def test_equal_lengths(kernel: ForwardKernel) -> None:
    softcap = 20.0 if kernel.traits.softcap else 0.0
    for q, k in LENGTHS:
        for window in WINDOWS:
            case = Case(q, k, batch=1, heads=(2, 1), window=window, softcap=softcap, **_sizes(kernel))
            Call(kernel, case).check()
    # Many items, so that those without a visible key stand between others.
    for window in ((-700, None), (None, -700), (900, -400), (-400, 900), (-3, 2)):
        Call(kernel, Case(1500, 1300, 3, (8, 4), window=window, softcap=softcap, **_sizes(kernel))).check()


@pytest.mark.parametrize("kernel", RAGGED_KERNELS, ids=ForwardKernel.short_form)
def test_sequences_of_different_lengths(kernel: ForwardKernel) -> None:
    sizes = _sizes(kernel)
    for window in WINDOWS:
        if not kernel.traits.paged:
            Call(kernel, Case(*RAGGED, window=window, **sizes)).check()
        used = (300, 1, 0, 129)
        Call(kernel, Case(5, 300, batch=4, heads=(4, 2), used=used, window=window, **sizes)).check()
        Call(kernel, Case(130, 300, batch=4, heads=(4, 2), used=used, window=window, **sizes)).check()
        if kernel.traits.paged:  # a tile in other boxes, and in one
            for page in (64, 256):
                case = Case(70, 300, batch=4, heads=(4, 2), used=used, page=page, window=window, **sizes)
                Call(kernel, case).check()


@pytest.mark.parametrize("d_head", [64, 128, 256])
@pytest.mark.parametrize("lengths", [(1, 4096), (60, 3000), (700, 700), (300, 900), (900, 300)])
def test_what_the_library_chooses(d_head: int, lengths: tuple[int, int]) -> None:
    """Keys behind the last visible one are cut off before the choice; they may be NaN."""
    seq_q, seq_k = lengths
    generator = torch.Generator("cuda").manual_seed(seq_q)
    q, k, v = (
        torch.randn(2, n, heads, d_head, device="cuda", generator=generator).bfloat16()
        for n, heads in ((seq_q, 4), (seq_k, 2), (seq_k, 2))
    )
    for causal in (False, True):
        for window in ((None, None), (100, 30), (400, None)):
            for offset in (-1000, -333, -64, -1, 1, 70, 5000):
                options = {"causal": causal, "window": window, "diagonal_offset": offset}
                o, lse = attention(q, k, v, return_lse=True, **options)
                expected, expected_lse = reference(q, k, v, **options)
                torch.testing.assert_close(o.double(), expected, atol=1.6e-2, rtol=1.6e-2)
                torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6)
                # The same call again, as it is remembered.
                again, lse_again = attention(q, k, v, return_lse=True, **options)
                assert torch.equal(o, again)
                assert torch.equal(lse, lse_again)
    k[:, -33:], v[:, -33:] = math.nan, math.nan
    o = attention(q, k, v, causal=True, diagonal_offset=-33)
    assert o.isfinite().all()
    assert last_kernel() is not None
