"""``select``: who can compute a problem, who is chosen, and the reasons."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from flash_attention.errors import NoKernelError
from flash_attention.prediction import predict
from flash_attention.problem import AttentionProblem, visible_limits
from flash_attention.select import GOOD_ENOUGH, required_traits, select
from flash_helpers.configs.traits import ForwardTraits
from flash_helpers.kernel_configs import (
    KNOWN_DEVICES,
    DType,
    FlashForwardKernelConfig,
    device_facts,
    get_kernels_to_build,
)
from flash_helpers.test.reference import visible_keys

H100, RTX3090 = device_facts("H100"), device_facts("RTX 3090")
LARGE = AttentionProblem(DType.BF16, 16, 4096, 4096, 16, 16, 128, 128)


class Database:
    """Knows one answer to everything."""

    def __init__(self, config: FlashForwardKernelConfig) -> None:
        self.config = config

    def best(self, problem, facts):
        return self.config, f"0.5 ms on {facts.name}"


# ---------------------------------------------------------------------- problems
def test_limits_that_hide_nothing_are_none():
    limits = (None, 0, 1, 2, 3, 4, 5)
    for seq_q, seq_k in itertools.product(range(1, 5), repeat=2):
        for causal, window in itertools.product((False, True), itertools.product(limits, repeat=2)):
            found = visible_limits(causal, window, seq_q, seq_k)
            for i in range(seq_q):
                assert visible_keys(i, seq_q, seq_k, causal, window) == visible_keys(
                    i, seq_q, seq_k, False, found
                )


def test_a_single_causal_query_needs_no_mask():
    assert visible_limits(True, (None, None), 1, 4096) == (None, None)
    assert visible_limits(True, (4095, 0), 1, 4096) == (None, None)
    assert visible_limits(True, (4094, None), 1, 4096) == (4094, None)


def test_features():
    plain = AttentionProblem(DType.FP16, 1, 10, 10, 2, 2, 64, 64)
    assert not any(plain.features().values())
    causal = dataclasses.replace(plain, right=0)
    assert [name for name, on in causal.features().items() if on] == ["causal"]
    local = dataclasses.replace(plain, left=3, right=0, softcap=True, sinks=True, varlen=True)
    assert all(local.features().values())
    assert not dataclasses.replace(plain, left=3, right=2).features()["causal"]


def test_required_traits():
    assert required_traits(LARGE) == ForwardTraits()
    assert required_traits(dataclasses.replace(LARGE, right=0)) == ForwardTraits(causal=True)


# ---------------------------------------------------------------------- who can
@pytest.mark.parametrize("name", KNOWN_DEVICES)
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("d", [8, 40, 64, 72, 128])
def test_the_choice_fits(name, dtype, d):
    facts = device_facts(name)
    for sizes in ((1, 1, 1), (2, 333, 77), (1, 1, 131072), (64, 128, 128), (16, 4096, 4096)):
        problem = AttentionProblem(dtype, *sizes, 8, 2, d, d, right=0)
        choice = select(problem, facts)
        config = choice.kernel.config
        assert config.infeasible_reason(facts) is None
        assert config.dtype is dtype
        assert config.d_head == (64 if d <= 64 else 128)
        assert choice.kernel.traits == ForwardTraits(causal=True)
        assert {choice.kernel, *(r.kernel for r in choice.rejected)} == {
            dataclasses.replace(choice.kernel, config=c) for c in get_kernels_to_build()
        }


def test_what_does_not_fit_is_rejected_with_the_reason():
    wide = FlashForwardKernelConfig(DType.BF16, 128, 128, 128, 8, True, True, True, 2, 2, 2, False, True)
    small = dataclasses.replace(wide, B_c=32)
    tight = dataclasses.replace(RTX3090, smem_per_block=64 * 1024)
    choice = select(LARGE, tight, candidates=[wide, small, dataclasses.replace(small, dtype=DType.FP16)])
    assert choice.kernel.config == small
    reasons = {r.kernel.config: r.reason for r in choice.rejected}
    assert "98304 bytes" in reasons[wide]
    assert "FP16" in reasons[dataclasses.replace(small, dtype=DType.FP16)]


@pytest.mark.parametrize("d", [136, 192, 256])
def test_no_kernel_for_a_head_size(d):
    with pytest.raises(NoKernelError, match=rf"head size is 128, the tensors' is {d}"):
        select(dataclasses.replace(LARGE, d_head=d, d_head_v=d), H100)


def test_no_kernel_for_a_feature():
    known = {f.name for f in dataclasses.fields(ForwardTraits)}
    for change in ({"left": 5}, {"softcap": True}, {"sinks": True}, {"varlen": True}):
        problem = dataclasses.replace(LARGE, **change)
        (feature,) = (name for name, on in problem.features().items() if on)
        if feature in known:
            assert getattr(required_traits(problem), feature)
        else:
            with pytest.raises(NoKernelError, match=feature):
                select(problem, H100)


def test_no_kernel_for_an_old_gpu():
    with pytest.raises(NoKernelError, match=r"needs 8\.0"):
        select(LARGE, dataclasses.replace(H100, capability=(7, 5)))


# ---------------------------------------------------------------------- who is chosen
def test_quickest_by_the_model():
    choice = select(LARGE, H100)
    seconds = predict(choice.kernel.config, LARGE, H100).seconds
    for rejected in choice.rejected:
        if rejected.kernel.config.dtype is DType.BF16 and rejected.kernel.config.d_head == 128:
            assert predict(rejected.kernel.config, LARGE, H100).seconds >= seconds
            assert "ms expected" in rejected.reason
    assert "by the model" in choice.reason


def test_measured_before_modelled():
    other = select(LARGE, H100).rejected[-1].kernel.config
    slow = next(r.kernel.config for r in reversed(select(LARGE, H100).rejected) if "ms expected" in r.reason)
    choice = select(LARGE, H100, Database(slow))
    assert choice.kernel.config == slow
    assert "measured" in choice.reason
    assert "0.5 ms on NVIDIA H100" in choice.reason
    assert select(LARGE, H100, Database(other)).kernel == select(LARGE, H100).kernel  # it cannot compute this


def test_a_good_built_kernel_comes_before_a_better_one_that_is_not():
    ranking = [select(LARGE, H100).kernel, *(r.kernel for r in select(LARGE, H100).rejected)]
    choice = select(LARGE, H100, is_built=lambda kernel: kernel == ranking[2])
    assert choice.kernel == ranking[2]
    assert ranking[0].short_form() in choice.reason
    assert "prepare()" in choice.reason
    assert choice.rejected[0].kernel == ranking[0]
    assert choice.rejected[0].reason == "it is not built yet"


def test_a_bad_built_kernel_does_not():
    best = select(LARGE, H100)
    slow = [r.kernel for r in best.rejected if "ms expected" in r.reason][-1]
    least = predict(best.kernel.config, LARGE, H100).seconds
    assert predict(slow.config, LARGE, H100).seconds > GOOD_ENOUGH * least
    choice = select(LARGE, H100, is_built=lambda kernel: kernel == slow)
    assert choice.kernel == best.kernel
    assert "not built yet" in choice.reason


def test_pure():
    assert select(LARGE, H100) == select(LARGE, H100)


# ---------------------------------------------------------------------- the model
def test_prediction_grows_with_the_work():
    config = select(LARGE, H100).kernel.config
    base = predict(config, LARGE, H100).seconds
    assert predict(config, dataclasses.replace(LARGE, seq_len_k=8192), H100).seconds == pytest.approx(
        2 * base, rel=0.02
    )
    assert predict(config, dataclasses.replace(LARGE, batch=32), H100).seconds == pytest.approx(
        2 * base, rel=0.05
    )
    assert predict(config, dataclasses.replace(LARGE, right=0), H100).seconds == pytest.approx(
        base / 2, rel=0.02
    )
    assert predict(config, LARGE, RTX3090).seconds > 3 * base


def test_small_problems_get_small_query_blocks():
    problem = dataclasses.replace(LARGE, batch=1, seq_len_q=256, seq_len_k=8192)
    assert select(problem, H100).kernel.config.B_r == 64
    assert select(LARGE, H100).kernel.config.B_r == 128
