"""Lines of docs/contract.md about calls on a part of the keys: masks that are moved, partial outputs, SMs."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from test_contract import attend, attend_packed, check, column, counted, packed, ramps

from flash_attention import explain_choice, merge
from flash_attention.cached import attention_cached
from flash_attention.errors import InfeasibleConfigError, NoKernelError
from flash_helpers.kernel_configs import DType, choose_ampere_kernel, choose_hopper_kernel, device_facts
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.select import select
from flash_helpers.test.utils import error_stats, reference

OFFSETS = [-400, -90, -31, -1, 1, 5, 64, 130, 400]


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (20, 9)}, {"window": (20, 9), "causal": True}]
)
def test_c36_a_diagonal_offset(device, offset, options):
    for seq_q, seq_k in ((90, 90), (50, 130), (130, 50), (1, 300)):
        check(*ramps((1, seq_q, 4, 64), (1, seq_k, 2, 64), device), diagonal_offset=offset, **options)


def test_c36_an_offset_moves_both_limits(device):
    given = counted(5, 7, device)
    assert column(attend(*counted(3, 7, device), causal=True, diagonal_offset=-2)) == [2.0, 2.5, 3.0]
    moved = attend(*given, window=(3, 1), diagonal_offset=2)
    assert torch.equal(moved, attend(*given, window=(1, 3)))
    assert torch.equal(attend(*given, diagonal_offset=5), attend(*given))
    # A part of the keys that ends 3 keys before the last query's place, beside the whole.
    q, k, v = ramps((1, 40, 2, 64), (1, 60, 2, 64), device)
    _, lse = attend(q, k[:, :57], v[:, :57], causal=True, diagonal_offset=3, return_lse=True)
    _, expected = reference(q, k, v, causal=True)
    torch.testing.assert_close(lse[:, :, :37].double(), expected[:, :, :37], atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize("bad", [1.0, True, "1", None, 0.0, False])
def test_c36_bad_offsets(device, bad):
    with pytest.raises(TypeError, match=r"diagonal_offset is .*; it must be an int"):
        attend(*counted(3, 3, device), diagonal_offset=bad)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (20, -3)}, {"window": (-2, 30)}, {"window": (-9, 4)}]
)
def test_c36_packed_and_cached(device, options):
    arguments, alone = packed(device)
    for offset in (-40, -3, 2, 19):
        o, lse = attend_packed(*arguments, return_lse=True, diagonal_offset=offset, **options)
        expected = [reference(*one, diagonal_offset=offset, **options) for one in alone]
        torch.testing.assert_close(o.double(), torch.cat([e[0] for e, _ in expected]), atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(
            lse.double(), torch.cat([x[0] for _, x in expected], 1), atol=1e-3, rtol=2e-6
        )
    for seq_q in (1, 70):
        q, k, v = ramps((3, seq_q, 4, 64), (3, 96, 2, 64), device)
        used = torch.tensor([96, 0, 31], dtype=torch.int32, device=device)
        for offset in (-40, -3, 0, 2, 19):
            o, lse = attention_cached(q, k, v, used, return_lse=True, diagonal_offset=offset, **options)
            for item, n in enumerate(used.tolist()):
                one = slice(item, item + 1)
                expected, expected_lse = reference(
                    q[one], k[one, :n], v[one, :n], diagonal_offset=offset, **options
                )
                torch.testing.assert_close(o[one].double(), expected, atol=2e-3, rtol=2e-3)
                torch.testing.assert_close(lse[one].double(), expected_lse, atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 700), (130, 700), (300, 400)])
@pytest.mark.parametrize(("window", "hidden"), [((37, -5), 5), ((None, -64), 64), ((300, -130), 130)])
def test_c30_keys_behind_the_last_window_may_hold_anything(device, window, hidden, seq_q, seq_k):
    q, k, v = ramps((1, seq_q, 4, 64), (1, seq_k, 2, 64), device)
    expected = attend(q, k, v, window=window)
    k[:, -hidden:] = v[:, -hidden:] = float("nan")
    assert torch.equal(attend(q, k, v, window=window), expected)


# ---------------------------------------------------------------------- partial outputs
FLOAT = torch.float32
MASKS = [
    {}, {"causal": True}, {"window": (60, 20)}, {"window": (90, None), "causal": True},
    {"window": (None, -30)}, {"causal": True, "diagonal_offset": 40},
]  # fmt: skip


def whole_and_parts(q, k, v, cuts, options, sinks=None):
    """float32 results over all keys, and over the parts between cuts, each with its place in the whole."""
    whole = attend(q, k, v, return_lse=True, out_dtype=FLOAT, sinks=sinks, **options)
    parts, offset = [], options.get("diagonal_offset", 0)
    for begin, end in itertools.pairwise(cuts):
        moved = {**options, "diagonal_offset": offset + k.shape[1] - end}
        own = sinks if begin == cuts[0] else None  # the sink's weight is that of one part
        keys = slice(begin, end)
        parts.append(attend(q, k[:, keys], v[:, keys], return_lse=True, out_dtype=FLOAT, sinks=own, **moved))
    return whole, parts


@pytest.mark.parametrize("more", [{}, {"softcap": 3.0}, {"sinks": True}, {"softmax_scale": 0.0}])
@pytest.mark.parametrize("options", MASKS, ids=str)
def test_c37_merged_parts_are_the_whole(device, options, more):
    """Within what rounding in float32 leaves, wherever the keys are cut."""
    rng = random.Random(str((options, more)))
    options = {**options, **{name: value for name, value in more.items() if name != "sinks"}}
    for seq_q, seq_k, heads, d, d_v in ((90, 200, 4, 64, 64), (1, 300, 4, 64, 64), (70, 131, 2, 72, 24)):
        q = ramps((2, seq_q, heads, d), (2, seq_k, 2, d), device)[0]
        k, v = ramps((2, seq_k, 2, d), (2, seq_k, 2, d_v), device)[::2]
        sinks = torch.linspace(-1, 2, heads, device=device) if "sinks" in more else None
        cuts = [0, *sorted(rng.sample(range(1, seq_k), rng.randint(1, 4))), seq_k]
        (out, lse), parts = whole_and_parts(q, k, v, cuts, options, sinks)
        assert out.dtype is FLOAT
        assert all(o.dtype is FLOAT for o, _ in parts)
        merged, merged_lse = merge([o for o, _ in parts], [x for _, x in parts])
        torch.testing.assert_close(merged_lse, lse, atol=2e-5, rtol=1e-6)
        if options.get("softmax_scale") == 0.0:  # every P is 1, which no rounding changes
            torch.testing.assert_close(merged, out, atol=2e-6, rtol=2e-6)
            continue
        # P is rounded to the input type, relative to the largest score of the keys that are there: the parts
        # are as far from what is right as the whole.
        expected, _ = reference(q, k, v, sinks=sinks, **options)
        allowed, error = (error_stats(x, expected).rel_frobenius for x in (out, merged))
        assert error <= 1.5 * allowed + 1e-6
        torch.testing.assert_close(merged.double(), expected, atol=1e-3, rtol=1e-3)


def test_c37_packed_and_cached_parts(device):
    arguments, alone = packed(device)
    q, k, v, offsets_q, offsets_k, longest_q, longest_k = arguments
    out = attend_packed(*arguments, causal=True, out_dtype=FLOAT)
    assert out.dtype is FLOAT
    expected = [reference(*one, causal=True) for one in alone]
    torch.testing.assert_close(out.double(), torch.cat([e[0] for e, _ in expected]), atol=1e-3, rtol=1e-3)
    rounded = attend_packed(*arguments, causal=True)
    torch.testing.assert_close(out, rounded.float(), atol=2e-3, rtol=2e-3)
    # Rows behind the last sequence are 0.
    more = torch.cat([q, q[:7]])
    padded, padded_lse = attend_packed(
        more, k, v, offsets_q, offsets_k, longest_q, longest_k, return_lse=True, out_dtype=FLOAT
    )
    assert (padded[-7:] == 0).all()
    assert (padded_lse[:, -7:] == -math.inf).all()
    q, k, v = ramps((3, 5, 4, 64), (3, 96, 2, 64), device)
    used = torch.tensor([96, 0, 31], dtype=torch.int32, device=device)
    o = attention_cached(q, k, v, used, out_dtype=FLOAT, causal=True)
    for item, n in enumerate(used.tolist()):
        one = slice(item, item + 1)
        expected, _ = reference(q[one], k[one, :n], v[one, :n], causal=True)
        torch.testing.assert_close(o[one].double(), expected, atol=1e-3, rtol=1e-3)


def test_c37_an_output_is_not_rounded(device):
    """Means of three numbers, which no 16-bit type holds."""
    o = attend(*counted(1, 3, device), softmax_scale=0.0, out_dtype=FLOAT)
    q, k, v = counted(2, 7, device)
    v = v.clone()
    v[:, 0] = 1e-3
    mean = v[0, :, 0, 0].double().mean().item()
    o = attend(q, k, v, softmax_scale=0.0, out_dtype=FLOAT)
    assert o[0, 0, 0, 0].item() == pytest.approx(mean, rel=3e-7)
    assert o[0, 0, 0, 0].item() != attend(q, k, v, softmax_scale=0.0)[0, 0, 0, 0].item()


def test_c37_out_of_the_type(device):
    q, k, v = ramps((1, 40, 2, 64), (1, 70, 2, 64), device)
    expected = attend(q, k, v, out_dtype=FLOAT)
    wide = torch.full((1, 40, 2, 68), 7.0, dtype=FLOAT, device=device)
    out = wide[..., :64]
    assert attend(q, k, v, out_dtype=FLOAT, out=out) is out
    assert torch.equal(out, expected)
    assert (wide[..., 64:] == 7.0).all()
    assert torch.equal(attend(q, k, v, out_dtype=q.dtype), attend(q, k, v))
    with pytest.raises(TypeError, match=r"out is torch\.float32; the result is torch\.float16"):
        attend(q, k, v, out=torch.empty_like(expected))
    with pytest.raises(TypeError, match=r"out is torch\.float16; the result is torch\.float32"):
        attend(q, k, v, out=torch.empty_like(q), out_dtype=FLOAT)
    for bad in (torch.float64, torch.bfloat16, "float32", 4):
        with pytest.raises(TypeError, match=r"out_dtype is .*; it must be torch\.float32"):
            attend(q, k, v, out_dtype=bad)
    # No key, no row, or a mask that hides all.
    assert (attend(q, k[:, :0], v[:, :0], out_dtype=FLOAT) == 0).all()
    hidden, lse = attend(q, k, v, window=(-3, 1), out_dtype=FLOAT, return_lse=True)
    assert hidden.dtype is FLOAT
    assert (hidden == 0).all()
    assert (lse == -math.inf).all()


def test_c37_a_configuration_that_the_caller_names(device):
    q, k, v = ramps((1, 130, 2, 64), (1, 200, 2, 64), device)
    config = choose_ampere_kernel(DType.FP16, 64, False, 512, exact=True, lse=True)[0].config
    o = attend(q, k, v, config=config, out_dtype=FLOAT)
    expected, _ = reference(q, k, v)
    torch.testing.assert_close(o.double(), expected, atol=1e-3, rtol=1e-3)


# ---------------------------------------------------------------------- SMs
def test_c38_a_limit_of_sms(device):
    q, k, v = ramps((2, 200, 4, 64), (2, 300, 2, 64), device)
    for options in ({}, {"causal": True}, {"window": (40, 9)}, {"out_dtype": FLOAT, "causal": True}):
        expected, _ = reference(q, k, v, **{n: x for n, x in options.items() if n != "out_dtype"})
        for n_sms in (1, 7, 64, 10_000):
            o = attend(q, k, v, n_sms=n_sms, **options)
            torch.testing.assert_close(o.double(), expected, atol=2e-3, rtol=2e-3)
    for bad in (0, -1):
        with pytest.raises(ValueError, match=rf"n_sms is {bad}; it must be at least 1"):
            attend(q, k, v, n_sms=bad)
    for bad in (1.0, True, "all"):
        with pytest.raises(TypeError, match=r"n_sms is .*; it must be an int"):
            attend(q, k, v, n_sms=bad)
    with pytest.raises(NotImplementedError, match=r"keep to no limit of SMs \(n_sms\): pass n_sms=None"):
        attend(q.requires_grad_(), k, v, n_sms=7)
    with pytest.raises(ValueError, match="kernels of gradients keep to no limit of SMs"):
        explain_choice(q.detach(), k, v, n_sms=7, direction="backward")


def test_c38_what_keeps_to_it():
    """By the facts of devices that need not be there."""
    meta = torch.empty(1, 4096, 8, 128, dtype=torch.float16, device="meta")
    h100, a100 = device_facts("H100"), device_facts("A100")
    choice = explain_choice(meta, meta, meta, causal=True, n_sms=100, facts=h100)
    assert choice.kernel.short_form().count("wg)")  # of the Hopper family
    assert any("its grids are not persistent" in r.reason for r in choice.rejected)
    with pytest.raises(
        NoKernelError, match="its grids are not persistent, so that no launch keeps to n_sms=100"
    ):
        explain_choice(meta, meta, meta, n_sms=100, facts=a100)
    assert explain_choice(meta, meta, meta, n_sms=108, facts=a100).kernel  # as many as there are
    ampere = choose_ampere_kernel(DType.FP16, 128, False, 4096)[0].config
    with pytest.raises(InfeasibleConfigError, match="not persistent"):
        explain_choice(meta, meta, meta, n_sms=100, config=ampere, facts=h100)
    assert explain_choice(meta, meta, meta, n_sms=132, config=ampere, facts=h100).kernel.config == ampere
    paired = choose_hopper_kernel(DType.FP16, 128, False, 4096)[0].config
    assert paired.paired_blocks
    with pytest.raises(InfeasibleConfigError, match="n_sms is 1, and its paired_blocks take two SMs"):
        explain_choice(meta, meta, meta, n_sms=1, config=paired, facts=h100)


def test_c38_keys_are_cut_for_as_many_sms():
    decode = AttentionProblem(DType.BF16, 1, 1, 65536, 8, 8, 128, 128)
    parts = {
        n: select(AttentionProblem(**{**vars(decode), "n_sms": n}), device_facts("H100")).n_splits
        for n in (None, 132, 64, 16)
    }
    assert parts[None] == parts[132] > parts[64] > parts[16] >= 1
