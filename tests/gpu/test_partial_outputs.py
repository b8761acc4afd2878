"""float32 outputs and limits of SMs on a GPU: the kernels that write them, and what the device says."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from graph_kernels import launched
from torch import Tensor
from trait_calls import Call, Case, differing

from flash_attention import attention, attention_varlen, explain_choice, last_kernel, merge
from flash_attention.backends import cuda
from flash_attention.backends.cuda import Features
from flash_attention.cached import attention_cached
from flash_attention.errors import KernelLaunchError, NoKernelError
from flash_helpers import build
from flash_helpers.kernel_configs import (
    KNOWN_DEVICES,
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    choose_hopper_kernel,
)
from flash_helpers.kernels.ampere.forward.decode import choose_ampere_decode_config
from flash_helpers.kernels.families import family_of
from flash_helpers.test.utils import reference

FLOAT = torch.float32
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and not ON_HOPPER, reason="no kernel of this GPU keeps to a number of SMs"
)


def ampere(traits: str, d_head: int = 128) -> ForwardKernel:
    config = FlashForwardKernelConfig(DType.BF16, d_head, 64, 64, 4, True, True, True, 0, 2, 2, False, True)
    return ForwardKernel(config, ForwardTraits(split=True, **dict.fromkeys(traits.split(), True)))


def hopper(traits: str, d_head: int = 128, seq_len: int = 512) -> ForwardKernel:
    on = ForwardTraits(split=True, **dict.fromkeys(traits.split(), True))
    return choose_hopper_kernel(DType.BF16, d_head, on.causal, seq_len, traits=on)[0]


DECODE = choose_ampere_decode_config(DType.BF16, 128, KNOWN_DEVICES["H100"])
KERNELS = [
    ampere(""), ampere("causal sinks", 64), ampere("window varlen"),
    ForwardKernel(DECODE, ForwardTraits(split=True)),
]  # fmt: skip
LIMITED = [
    hopper(""), hopper("causal sinks", 64), hopper("window varlen"), hopper("varlen", 128, 1),
    hopper("causal padded_head"),
]  # fmt: skip
PLAIN = [  # not split
    choose_hopper_kernel(DType.BF16, 128, causal, 4096)[0] for causal in (False, True)
]  # fmt: skip
if ON_HOPPER:
    KERNELS += LIMITED


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    major, minor = torch.cuda.get_device_capability()
    build.build_kernels([*KERNELS, *(PLAIN if ON_HOPPER else [])], [10 * major + minor])


class FloatCall(Call):
    """A call whose output is float32."""

    n_sms = 0

    def launch(self) -> tuple[Tensor, Tensor]:
        """As of ``Call``, with the output in its middle of a float32 buffer."""
        given = cuda.forward

        def forward(kernel, q, k, v, o, lse, scale, features):
            self.buffer = torch.full((*o.shape[:-1], self.d_v + 4), 777.0, dtype=FLOAT, device="cuda")
            self.wide = self.buffer[..., : self.d_v]
            self.wide.fill_(math.nan)
            given(
                kernel, q, k, v, self.wide, lse, scale,
                features._replace(o_float32=True, n_sms=self.n_sms),
            )  # fmt: skip

        cuda.forward = forward
        try:
            narrow, lse = super().launch()
        finally:
            cuda.forward = given
        assert narrow.isnan().all(), "the 16-bit output was written"
        assert (self.buffer[..., self.d_v :] == 777.0).all(), "something beyond the output was written"
        return self.wide.clone(), lse


CASES = (
    Case(200, 300), Case(1, 2000, 3, (8, 2)), Case(70, 33, parts=1), Case(300, 1000, 1, parts=3),
    Case(65, 130, parts=5), Case(3, 0, parts=1),
)  # fmt: skip
PACKED = (
    Case((100, 1, 0, 65, 128, 7), (100, 90, 33, 0, 257, 64), parts=1),
    Case((100, 1, 0, 65, 128, 7), (100, 90, 33, 0, 257, 64), parts=3),
    Case(5, 300, batch=4, used=(300, 1, 0, 129)),
)


def _cases(kernel: ForwardKernel) -> list[Case]:
    d = 104 if kernel.traits.padded_head else 0
    window = (90, 20) if kernel.traits.window else (None, None)
    return [
        Case(**{**vars(case), "d": d, "window": window})
        for case in (PACKED if kernel.traits.varlen else CASES)
    ]


@pytest.mark.parametrize("kernel", KERNELS, ids=ForwardKernel.short_form)
@pytest.mark.parametrize("n_sms", [0, 1, 5, 100])
def test_kernels_that_split_keys_write_float32(kernel: ForwardKernel, n_sms: int) -> None:
    """Against the reference, and against their own 16-bit output, which is this one rounded once."""
    if n_sms and family_of(kernel).name != "hopper":
        return
    for case in _cases(kernel):
        call = FloatCall(kernel, case)
        call.n_sms = n_sms
        o, lse = call.check()
        rounded, rounded_lse = Call(kernel, case).launch()
        assert torch.equal(lse, rounded_lse)
        torch.testing.assert_close(o, rounded.float(), atol=1e-6, rtol=2**-8)


@pytest.mark.parametrize("kernel", LIMITED if ON_HOPPER else [], ids=ForwardKernel.short_form)
@pytest.mark.parametrize("n_sms", [1, 33, 131, 4000])
def test_fewer_sms_change_roundings_alone(kernel: ForwardKernel, n_sms: int) -> None:
    """The kernel that adds parts up is another where SMs are limited, and takes them in another order.

    So sums differ by roundings of float32, which count from the row's largest value: an output near 0, where
    parts cancel, may differ by more than a step of 16 bits. LSEs are worked out by the same code.
    """
    for case in _cases(kernel):
        o, lse = Call(kernel, case).launch()
        limited = Call(kernel, case)
        given = cuda.forward
        cuda.forward = lambda *args: given(*args[:-1], args[-1]._replace(n_sms=n_sms))  # noqa: B023
        try:
            found, found_lse = limited.launch()
        finally:
            cuda.forward = given
        assert not differing(found_lse, lse), f"{case}: LSE: {differing(found_lse, lse)}"
        x, y = found.float(), o.float()
        allowed = 2**-7 * y.abs() + 2**-22 * y.abs().amax(-1, keepdim=True)
        wrong = ~((x - y).abs() <= allowed)
        assert not wrong.any(), f"{case}: {differing(x.where(wrong, y), y)}"


def _inputs(seq_q: int, seq_k: int, heads: int = 8, heads_kv: int = 2, d: int = 128) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seq_q + seq_k)
    return [
        torch.randn(2, n, h, d, device="cuda", generator=generator).bfloat16()
        for n, h in ((seq_q, heads), (seq_k, heads_kv), (seq_k, heads_kv))
    ]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 40)}], ids=str)
@pytest.mark.parametrize("lengths", [(1, 4000), (700, 700), (300, 1500)])
def test_merged_parts_are_the_whole(lengths: tuple[int, int], options: dict[str, object]) -> None:
    q, k, v = _inputs(*lengths)
    sinks = torch.linspace(-1, 2, 8, device="cuda")
    whole, lse = attention(q, k, v, return_lse=True, out_dtype=FLOAT, sinks=sinks, **options)
    assert last_kernel().traits.split
    cuts = [0, 37, lengths[1] // 2, lengths[1] - 100, lengths[1]]
    parts = [
        attention(
            q, k[:, a:b], v[:, a:b], return_lse=True, out_dtype=FLOAT, sinks=sinks if a == 0 else None,
            diagonal_offset=lengths[1] - b, **options,
        )
        for a, b in itertools.pairwise(cuts)
    ]  # fmt: skip
    merged, merged_lse = merge([o for o, _ in parts], [x for _, x in parts])
    torch.testing.assert_close(merged_lse, lse, atol=2e-5, rtol=2e-6)
    torch.testing.assert_close(merged, whole, atol=4e-3, rtol=4e-3)  # P is rounded to bf16
    expected, _ = reference(q, k, v, sinks=sinks, **options)
    torch.testing.assert_close(merged.double(), expected, atol=6e-3, rtol=6e-3)
    # P of 1, which no rounding changes.
    plain = [attention(q, k, v, softmax_scale=0.0, out_dtype=FLOAT)]
    halves = [
        attention(q, k[:, s], v[:, s], softmax_scale=0.0, out_dtype=FLOAT, return_lse=True)
        for s in (slice(0, lengths[1] // 3), slice(lengths[1] // 3, None))
    ]
    torch.testing.assert_close(merge(*zip(*halves, strict=True))[0], plain[0], atol=3e-6, rtol=3e-6)


def test_packed_and_cached_outputs_and_remembered_calls() -> None:
    q, k, v = (x.flatten(0, 1) for x in _inputs(300, 300))
    ends = torch.tensor([0, 100, 100, 590], dtype=torch.int32, device="cuda")
    given = (q, k, v, ends, ends, 490, 490)
    for _ in range(2):  # the second is remembered
        o, lse = attention_varlen(*given, causal=True, out_dtype=FLOAT, return_lse=True)
        assert (o[590:] == 0).all()
        assert (lse[:, 590:] == -math.inf).all()
        rounded = attention_varlen(*given, causal=True)
        assert rounded.dtype is torch.bfloat16
        torch.testing.assert_close(o, rounded.float(), atol=1e-2, rtol=1e-2)
    q, k, v = _inputs(1, 2000)
    used = torch.tensor([2000, 77], dtype=torch.int32, device="cuda")
    for _ in range(2):
        o = attention_cached(q, k, v, used, out_dtype=FLOAT)
        assert o.dtype is FLOAT
        torch.testing.assert_close(o, attention_cached(q, k, v, used).float(), atol=1e-2, rtol=1e-2)


# ---------------------------------------------------------------------- SMs
@pytest.mark.skipif(
    not hasattr(torch.cuda.CUDAGraph, "raw_cuda_graph"), reason="before torch 2.8 no graph shows its kernels"
)
@needs_hopper
@pytest.mark.parametrize("n_sms", [1, 2, 40, 100, 131, 132, 1000])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((2048, 2048), {}), ((2048, 2048), {"causal": True}), ((900, 2048), {"window": (500, 0)}),
        ((1, 8192), {}), ((2048, 2048), {"out_dtype": FLOAT, "causal": True}),
    ],
    ids=["full", "causal", "window", "one query", "causal, float32"],
)  # fmt: skip
def test_a_call_keeps_to_its_sms(lengths: tuple[int, int], options: dict[str, Any], n_sms: int) -> None:
    """Each kernel has at most so many thread blocks: they are persistent.

    A test has one problem, so that it compiles one kernel at most within its time limit: what is chosen for
    so few SMs is chosen for nothing else, and built nowhere ahead.
    """
    count = torch.cuda.get_device_properties(0).multi_processor_count
    q, k, v = _inputs(*lengths)
    expected, _ = reference(q, k, v, **{n: x for n, x in options.items() if n != "out_dtype"})
    for _ in range(2):  # the second is remembered
        o = attention(q, k, v, n_sms=n_sms, **options)
        torch.testing.assert_close(o.double(), expected, atol=1.6e-2, rtol=1.6e-2)
    kernel = last_kernel()
    assert kernel is not None
    if n_sms < count:
        text = f"{kernel.short_form()}; {explain_choice(q, k, v, n_sms=n_sms, **options).reason}"
        assert family_of(kernel).name == "hopper", text
        kernels = launched(lambda: attention(q, k, v, n_sms=n_sms, **options))
        text = f"{kernels}; {text}"
        parts = ["hopper_forward_kernel", *(["split_combine_rows"] if kernel.traits.split else [])]
        assert len(kernels) == len(parts), text
        assert all(any(part in name for name, _ in kernels) for part in parts), text
        assert max(n_blocks for _, n_blocks in kernels) <= n_sms, text


@needs_hopper
def test_what_cannot_keep_to_it_is_refused() -> None:
    q, k, v = _inputs(512, 512)
    o = torch.empty_like(q)
    features = Features(d_head_v=128, n_sms=1)
    paired = next(kernel for kernel in PLAIN if kernel.config.paired_blocks)
    with pytest.raises(KernelLaunchError):
        cuda.forward(paired, q, k, v, o, None, 0.1, features)
    cuda.forward(paired, q, k, v, o, None, 0.1, features._replace(n_sms=2))
    expected, _ = reference(q, k, v, softmax_scale=0.1)
    torch.testing.assert_close(o.double(), expected, atol=1.6e-2, rtol=1.6e-2)


@pytest.mark.skipif(ON_HOPPER, reason="kernels of the Hopper family keep to a number of SMs")
def test_other_gpus_refuse_a_limit() -> None:
    with pytest.raises(NoKernelError, match="its grids are not persistent"):
        attention(*_inputs(64, 64), n_sms=2)
