"""``select``: who can compute a problem, who is chosen, and the reasons."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from pathlib import Path

import pytest
import torch

from flash_attention.checks.tma import stride_obstacle
from flash_attention.errors import NoKernelError
from flash_helpers.build import build_kernels
from flash_helpers.kernel_configs import (
    KNOWN_DEVICES,
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    choose_hopper_kernel,
    device_facts,
    get_kernels_to_build,
)
from flash_helpers.kernels.ampere.forward.choices import choose_ampere_kernel
from flash_helpers.kernels.ampere.forward.decode import choose_ampere_decode_config
from flash_helpers.kernels.families import DIRECTIONS, direction_of, family_of
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.pages import PAGE_ROWS, page_obstacle
from flash_helpers.kernels.problem import AttentionProblem, visible_limits
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.results.lookup import TuningResults
from flash_helpers.select.candidates import default_candidates, kernel_for, size_reason, unable_reason
from flash_helpers.select.prediction import MODEL_ERROR, predict
from flash_helpers.select.select import invariant_class, ranking, select
from flash_helpers.test.reference import visible_keys

AMPERE = get_kernels_to_build()[0]
AMPERE_BF16 = next(c for c in get_kernels_to_build() if (c.dtype, c.d_head) == (DType.BF16, 128))
INCLUDE = Path(__file__).parents[2] / "src" / "include"
H100, H200, RTX3090 = (device_facts(name) for name in ("H100", "H200", "RTX 3090"))
LARGE = AttentionProblem(DType.BF16, 16, 4096, 4096, 16, 16, 128, 128)


class Database:
    """Knows one answer to everything."""

    def __init__(self, config: FlashForwardKernelConfig) -> None:
        self.config = config

    def ranked(self, problem, facts, chosen=None):
        return [(self.config, f"0.5 ms on {facts.name}")]


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
    local = dataclasses.replace(
        plain, left=3, right=0, softcap=True, sinks=True, varlen=True, cached=True, paged=True
    )
    assert [name for name, on in local.features().items() if not on] == ["causal", "planned"]
    assert dataclasses.replace(local, planned=True).features()["planned"]
    assert local.features().keys() <= {f.name for f in dataclasses.fields(ForwardTraits)}


def test_kernels_are_compiled_for_the_features():
    assert kernel_for(AMPERE, LARGE).traits == ForwardTraits()
    assert kernel_for(AMPERE, dataclasses.replace(LARGE, right=0)).traits == ForwardTraits(causal=True)


# ---------------------------------------------------------------------- who can
@pytest.mark.parametrize("name", KNOWN_DEVICES)
@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("d", [8, 40, 64, 72, 128, 136, 192, 256])
def test_the_choice_fits(name, dtype, d):
    facts = device_facts(name)
    sizes_of = {True: (64, 96, 128, 192, 256), False: (64, 128, 256)}  # on Hopper, elsewhere
    for sizes in ((1, 1, 1), (2, 333, 77), (1, 1, 131072), (64, 128, 128), (16, 4096, 4096)):
        problem = AttentionProblem(dtype, *sizes, 8, 2, d, d, right=0)
        choice = select(problem, facts)
        config = choice.kernel.config
        assert config.infeasible_reason(facts) is None
        assert config.dtype is dtype
        on_hopper = "Hopper" in type(config).__name__
        assert config.d_head == min(size for size in sizes_of[on_hopper] if size >= d)
        assert not on_hopper or facts.capability == (9, 0)
        traits = choice.kernel.traits
        assert traits.causal == (problem.right == 0)
        assert traits.padded_head == (d != config.d_head)
        assert (choice.n_splits > 1) == traits.split
        assert {choice.kernel.config, *(r.kernel.config for r in choice.rejected)} >= set(
            default_candidates()
        )
        assert select(problem, facts, explained=False) == dataclasses.replace(choice, rejected=())


def test_what_does_not_fit_is_rejected_with_the_reason():
    wide = FlashForwardKernelConfig(DType.BF16, 128, 128, 128, 8, True, True, True, 2, 2, 2, False, True)
    small = dataclasses.replace(wide, B_c=32)
    tight = dataclasses.replace(RTX3090, smem_per_block=64 * 1024)
    choice = select(LARGE, tight, candidates=[wide, small, dataclasses.replace(small, dtype=DType.FP16)])
    assert choice.kernel.config == small
    reasons = {r.kernel.config: r.reason for r in choice.rejected}
    assert "98304 bytes" in reasons[wide]
    assert "FP16" in reasons[dataclasses.replace(small, dtype=DType.FP16)]


@pytest.mark.parametrize(("d", "on_hopper"), [(136, 192), (192, 192), (256, 256)])
def test_large_head_sizes(d, on_hopper):
    problem = dataclasses.replace(LARGE, d_head=d, d_head_v=d)
    assert select(problem, RTX3090).kernel.config.d_head == 256
    assert select(problem, H100).kernel.config.d_head == on_hopper
    with pytest.raises(NoKernelError, match=rf"head size is 128, the tensors' is {d}"):
        select(problem, RTX3090, candidates=get_kernels_to_build())


@pytest.mark.parametrize("change", [{"left": 5}, {"softcap": True}, {"sinks": True}, {"varlen": True}])
def test_features_that_families_lack_rule_them_out(change):
    problem = dataclasses.replace(LARGE, **change)
    (feature,) = (name for name, on in problem.features().items() if on)
    fitting = [c for c in default_candidates() if size_reason(c, problem, [c]) is None]
    assert fitting
    for config in fitting:
        direction = direction_of(kernel_for(config, problem))
        reason = unable_reason(config, problem, [config])
        assert (reason is None) == (feature in direction.traits)
        if reason:
            assert feature in reason
            with pytest.raises(ValueError, match=feature):
                build_kernels([kernel_for(config, problem)], [90])
    if not any(feature in direction.traits for direction in DIRECTIONS):
        with pytest.raises(NoKernelError, match=feature):
            select(problem, H100)


@pytest.mark.parametrize("invariant", [False, True])
def test_no_kernel_for_an_old_gpu(invariant):
    old, problem = (
        dataclasses.replace(H100, capability=(7, 5)),
        dataclasses.replace(LARGE, invariant=invariant),
    )
    with pytest.raises(NoKernelError, match=r"run on 8\.0 and newer"):
        select(problem, old)
    with pytest.raises(NoKernelError, match=r"run on 8\.0 and newer"):
        invariant_class(problem, old)


# ---------------------------------------------------------------------- who is chosen
def test_quickest_by_the_model():
    choice = select(LARGE, RTX3090, candidates=get_kernels_to_build())
    seconds = predict(choice.kernel, LARGE, RTX3090).seconds
    modelled = [r for r in choice.rejected if "ms expected" in r.reason]
    assert len(modelled) > 10
    assert all(predict(r.kernel, LARGE, RTX3090).seconds >= seconds for r in modelled)
    assert "by the model" in choice.reason


def test_measured_before_modelled():
    slow = [r for r in select(LARGE, RTX3090).rejected if "ms expected" in r.reason][-1].kernel.config
    choice = select(LARGE, RTX3090, Database(slow))
    assert choice.kernel.config == slow
    assert "measured" in choice.reason
    assert "0.5 ms on NVIDIA GeForce RTX 3090" in choice.reason
    other = next(c for c in get_kernels_to_build() if c.d_head == 64)
    assert (
        select(LARGE, RTX3090, Database(other)).kernel == select(LARGE, RTX3090).kernel
    )  # cannot compute it


@pytest.mark.parametrize("right", [None, 0])
@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_defaults_of_the_families(name, right):
    problem, facts = dataclasses.replace(LARGE, right=right), device_facts(name)
    if facts.capability == (9, 0):
        measured, reason = choose_hopper_kernel(DType.BF16, 128, right == 0, LARGE.seq_len_q)
    else:
        measured, reason = choose_ampere_kernel(
            DType.BF16, 128, right == 0, LARGE.seq_len_q, facts.capability
        )
    choice = select(problem, facts)
    assert choice.kernel == measured
    assert reason in choice.reason
    assert select(problem, facts, Database(AMPERE_BF16)).kernel.config == AMPERE_BF16


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_no_rounded_row_sums_where_the_lse_is_wanted(name):
    for seq in (1, 128, 4096):
        problem = dataclasses.replace(LARGE, seq_len_q=seq, lse=True)
        choice = select(problem, device_facts(name))
        assert not getattr(choice.kernel.config, "tensor_row_sums", False)
    assert select(LARGE, device_facts("A100")).kernel.config.tensor_row_sums


def test_the_ampere_family_where_bulk_copies_do_not_reach():
    k = torch.empty(1, 64, 2, 128, dtype=torch.bfloat16).expand(4, -1, -1, -1)
    obstacle = stride_obstacle(q=torch.empty(4, 64, 2, 128), k=k)
    assert obstacle == "k has a stride of 0 in dimension 0; strides must be positive"
    choice = select(dataclasses.replace(LARGE, tma_obstacle=obstacle), H100)
    assert isinstance(choice.kernel.config, FlashForwardKernelConfig)
    assert obstacle in choice.reason
    hopper, _ = choose_hopper_kernel(DType.BF16, 128, False, LARGE.seq_len_q)
    assert obstacle in next(r.reason for r in choice.rejected if r.kernel == hopper)


def test_tensors_that_are_copied_first_are_no_obstacle():
    assert stride_obstacle(k=torch.empty(1, 64, 2, 68)[..., :64].expand(4, -1, -1, -1)) is not None
    assert stride_obstacle(k=torch.empty(1, 64, 2, 65)[..., :64].expand(4, -1, -1, -1)) is None
    assert stride_obstacle(k=torch.empty(2, 64, 64, 2).transpose(2, 3)) is None


def test_pure(monkeypatch):
    """Nothing but problem, facts, results and candidates goes in, and no kernel is looked for."""
    assert set(inspect.signature(select).parameters) == {
        "problem", "facts", "database", "candidates", "explained",
    }  # fmt: skip
    monkeypatch.setattr("flash_helpers.build.find_library", lambda *a: pytest.fail("the cache was asked"))
    assert select(LARGE, H100) == select(LARGE, H100)


@pytest.mark.parametrize("name", KNOWN_DEVICES)
@pytest.mark.parametrize("seq_len_q", [1, 4096])
def test_the_ranking_begins_with_the_choice_and_has_every_able_kernel_once(name, seq_len_q):
    problem, facts = dataclasses.replace(LARGE, seq_len_q=seq_len_q), device_facts(name)
    ranked, choice = ranking(problem, facts), select(problem, facts)
    assert ranked[0] == choice
    kernels = [one.kernel for one in ranked]
    assert len(set(kernels)) == len(kernels) > 3
    assert [r.kernel for r in choice.rejected[: len(ranked) - 1]] == kernels[1:]
    assert all((one.n_splits > 1) == one.kernel.traits.split for one in ranked)
    seconds = [predict(k, choice.problem or problem, facts).seconds for k in kernels[1:]]
    assert seconds == sorted(seconds)


def test_what_was_measured_comes_before_what_the_model_likes():
    facts = device_facts("H100")
    default = select(LARGE, facts).kernel
    tuned = next(c for c in default_candidates() if (c.dtype, c.d_head) == (DType.BF16, 128))

    class Tuned:
        def ranked(self, problem, facts, chosen=None):
            return [(tuned, "900.0 TFLOP/s"), (chosen, "800.0 TFLOP/s")]

    first, second, *_ = ranking(LARGE, facts, Tuned())
    assert (first.kernel.config, second.kernel) == (tuned, default)
    assert first.reason == "measured to be the quickest: 900.0 TFLOP/s"
    assert first.rejected[0].kernel == default
    assert first.rejected[0].reason == "measured beside it: 800.0 TFLOP/s"


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_reasons_against_kernels_are_reasons(name):
    """None is "1.00 times the chosen one's", and none is faster by the model without a word about it."""
    for problem in (LARGE, DECODE, dataclasses.replace(LARGE, d_head=64, d_head_v=64, seq_len_q=333)):
        choice = select(problem, device_facts(name))
        for rejected in choice.rejected:
            assert "1.00 times" not in rejected.reason
        seen, facts = choice.problem or problem, device_facts(name)
        chosen = predict(choice.kernel, seen, facts).seconds
        for rejected in (r for r in choice.rejected if "ms expected" in r.reason):
            ratio = predict(rejected.kernel, seen, facts).seconds / chosen
            alike = 1 / (1 + MODEL_ERROR) < ratio < 1 + MODEL_ERROR
            assert ("can't tell it from the chosen one" in rejected.reason) == alike
            expected = ratio < 1 and not alike
            assert ("measurements and a family's default go before the model" in rejected.reason) == expected


# ---------------------------------------------------------------------- split keys
DECODE = AttentionProblem(DType.BF16, 1, 1, 16384, 8, 8, 128, 128)


def test_one_query_with_many_keys_is_split():
    choice = select(DECODE, H100)
    assert choice.kernel.traits.split
    assert choice.n_splits * DECODE.n_heads > H100.sm_count / 2
    assert f"keys in {choice.n_splits} parts" in choice.reason
    assert not select(LARGE, H100).kernel.traits.split
    assert not select(dataclasses.replace(DECODE, seq_len_k=300), H100).kernel.traits.split


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_the_heads_of_a_group_become_rows(name):
    problem = dataclasses.replace(DECODE, n_heads=32, left=4000)
    choice = select(problem, device_facts(name))
    assert choice.problem == dataclasses.replace(DECODE, seq_len_q=4, seq_len_k=4001)
    assert choice.kernel.traits == ForwardTraits(split=True)
    assert choice.kernel.config.B_r == 64
    kept = select(dataclasses.replace(problem, sinks=True), device_facts(name))  # a sink is a head's own
    assert kept.problem.n_heads == 32
    assert select(DECODE, device_facts(name)).problem is None


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_many_single_queries_need_no_parts_but_the_same_tiles(name):
    facts = device_facts(name)
    config = select(DECODE, facts).kernel.config
    many = dataclasses.replace(DECODE, batch=1000)
    assert select(many, facts).kernel == ForwardKernel(config)
    assert select(dataclasses.replace(many, seq_len_k=500), facts).kernel.config != config


def test_the_family_that_reads_faster_decodes():
    h200 = device_facts("H200")

    def family(facts, **changes):
        return family_of(select(dataclasses.replace(DECODE, **changes), facts).kernel).name

    cache = {"varlen": True, "cached": True}
    for changes in ({}, {"seq_len_k": 1024}, {"batch": 32, "seq_len_k": 4096}, cache):
        assert family(H100, **changes) == family(h200, **changes) == "hopper"
    for few in ({"batch": 8, "seq_len_k": 1000}, {"seq_len_q": 4096}):
        assert family(h200, **few) == "hopper"
    assert family(H100, **cache, paged=True) == family(h200, **cache, paged=True) == "hopper"
    assert family(h200, d_head=96, d_head_v=96) == "ampere"
    choice = select(DECODE, h200)
    blocks = choice.n_splits * DECODE.n_heads  # one an SM
    assert h200.sm_count - DECODE.n_heads < blocks <= h200.sm_count


def test_a_last_wave_of_few_blocks_is_filled_by_parts():
    choice = select(dataclasses.replace(DECODE, batch=17), H100)  # 136 kv heads on 132 multiprocessors
    assert choice.n_splits > 1


@pytest.mark.parametrize("paged", [False, True])
def test_one_query_over_a_cache_packs_its_groups_too(paged):
    cache = dataclasses.replace(DECODE, n_heads=32, varlen=True, cached=True, paged=paged)
    choice = select(cache, H100)
    assert choice.problem == dataclasses.replace(cache, seq_len_q=4, n_heads=8)
    assert choice.kernel.traits == ForwardTraits(varlen=True, split=True, paged=paged)
    assert isinstance(choice.kernel.config, HopperForwardKernelConfig)
    assert choice.n_splits > 8
    for kept in ({"left": 100}, {"sinks": True}, {"cached": False}):
        assert dataclasses.replace(cache, **kept).with_rows_packed() == dataclasses.replace(cache, **kept)


def test_pages_that_bulk_copies_cannot_reach_go_to_the_ampere_family():
    assert page_obstacle(48) is None
    problem = dataclasses.replace(
        DECODE, varlen=True, cached=True, paged=True, tma_obstacle=page_obstacle(100)
    )
    choice = select(problem, H100)
    assert not isinstance(choice.kernel.config, HopperForwardKernelConfig)
    obstacle = "not the hopper family's kernel: its bulk copies (TMA) cannot reach the tensors: "
    assert choice.reason.endswith(f"; {obstacle}pages have 100 rows; they must have a multiple of 16")
    assert choice.reason.count("the hopper family's kernel") == 1  # for keys in parts, and for whole rows
    text = (INCLUDE / "hopper" / "forward" / "launcher.cuh").read_text()
    assert f"kPageAlignment = {PAGE_ROWS};" in text


def test_kernels_that_copy_through_registers_take_no_pages():
    problem = dataclasses.replace(DECODE, varlen=True, cached=True, paged=True)
    slow = dataclasses.replace(
        choose_ampere_decode_config(DType.BF16, 128, H100),
        async_copy=False, eager_load_blocks=False, kv_stages=1, mbarrier=False,
    )  # fmt: skip
    assert "async_copy" in unable_reason(slow, problem, [slow])


def test_a_window_limits_the_parts():
    windowed = dataclasses.replace(DECODE, seq_len_q=64, seq_len_k=65536, left=1000, right=0)
    assert windowed.keys_of_block(64) == 1064
    choice = select(windowed, H100)
    assert 1 < choice.n_splits <= -(-1064 // choice.kernel.config.B_c)


@pytest.mark.parametrize(
    ("lengths", "limits"),
    list(
        itertools.product(
            [(1, 40), (9, 30), (30, 9)],
            itertools.product((None, 0, 3, 50, -2, -12), (None, 0, 3, 50, -2, -12)),
        )
    ),
)
def test_problems_of_masks_of_any_sign_say_what_is_seen(lengths, limits):
    """What a kernel is given, and the counts of the model, against looking at every query and key."""
    (seq_q, seq_k), (left, right) = lengths, limits
    given = AttentionProblem(DType.BF16, 1, seq_q, seq_k, 4, 2, 64, 64, left=left, right=right)
    seen = [visible_keys(i, seq_q, seq_k, False, limits) for i in range(seq_q)]
    if given.sees_nothing:
        assert not any(seen)
        return
    assert any(seen)
    for B_r in (4, 16):
        blocks = [[r for r in seen[first : first + B_r] if r] for first in range(0, seq_q, B_r)]
        spans = [max(r.stop for r in block) - min(r.start for r in block) for block in blocks if block]
        assert max(spans) <= given.keys_of_block(B_r) <= seq_k
    asked = given.without_idle_limits()
    packed = asked.with_rows_packed()
    end = seq_k + min(asked.right or 0, 0)
    first = end - packed.seq_len_k  # backends cut keys so
    assert 0 <= first <= end <= seq_k
    rows = 1 if seq_q == 1 else packed.seq_len_q  # the heads of a group see the same
    found = [visible_keys(i, rows, packed.seq_len_k, False, (packed.left, packed.right)) for i in range(rows)]
    assert [[j + first for j in keys] for keys in found] == [list(keys) for keys in seen]
    assert packed.right is None or packed.right >= 0


# ---------------------------------------------------------------------- the model
def test_prediction_grows_with_the_work():
    kernel = ForwardKernel(AMPERE_BF16)
    base = predict(kernel, LARGE, H100).seconds
    assert predict(kernel, dataclasses.replace(LARGE, seq_len_k=8192), H100).seconds == pytest.approx(
        2 * base, rel=0.02
    )
    assert predict(kernel, dataclasses.replace(LARGE, batch=32), H100).seconds == pytest.approx(
        2 * base, rel=0.05
    )
    # A little more than half: tiles that the diagonal crosses are computed whole.
    causal = predict(kernel, dataclasses.replace(LARGE, right=0), H100).seconds
    assert base / 2 < causal < 1.06 * base / 2
    assert predict(kernel, LARGE, RTX3090).seconds > 3 * base


def test_static_rounds_cost_nothing_where_all_blocks_are_as_long():
    static = choose_hopper_kernel(DType.BF16, 128, False, 128)[0].config
    counted = dataclasses.replace(static, dynamic_schedule=True)

    def seconds(config, seq_len):
        problem = dataclasses.replace(LARGE, batch=128, seq_len_q=seq_len, seq_len_k=seq_len, right=0)
        return predict(kernel_for(config, problem), problem, H200).seconds

    assert seconds(static, 128) == seconds(counted, 128)  # one block a sequence
    assert seconds(static, 256) > seconds(counted, 256)


@pytest.mark.parametrize("name", ["H100", "H200", "A100"])
@pytest.mark.parametrize("right", [None, 0])
def test_sequences_of_up_to_128_get_no_taller_blocks(name, right):
    features = (
        {},
        {"softcap": True},
        {"varlen": True},
        {"lse": True},
        {"invariant": True},
        {"dropout": True},
    )
    for d_head, seq_len, more in itertools.product((64, 96, 128, 192, 256), (1, 64, 77, 128), features):
        short = AttentionProblem(
            DType.BF16, 256, seq_len, seq_len, 16, 16, d_head, d_head, right=right, **more
        ).without_idle_limits()
        for problem in (short, dataclasses.replace(short, seq_len_k=512)):
            choice = select(problem, device_facts(name), explained=False)
            assert choice.kernel.config.B_r <= 128, problem.label()


def test_what_led_at_the_length_of_its_bucket_does_not_where_blocks_are_emptier():
    tall = choose_hopper_kernel(DType.BF16, 64, True, 512)[0].config
    problem = dataclasses.replace(LARGE, d_head=64, d_head_v=64, seq_len_q=512, seq_len_k=512, right=0)
    assert select(problem, H200, Database(tall)).kernel.config == tall
    shorter = dataclasses.replace(problem, seq_len_q=384, seq_len_k=384)
    assert select(shorter, H200, TuningResults(shipped_only=True)).kernel.config.B_r == 192


def test_small_problems_get_small_query_blocks():
    problem = dataclasses.replace(LARGE, batch=1, seq_len_q=256, seq_len_k=256)
    wide = ForwardKernel(dataclasses.replace(AMPERE_BF16, B_r=128, n_warps=8))
    narrow = ForwardKernel(dataclasses.replace(AMPERE_BF16, B_r=64, n_warps=4))
    assert predict(narrow, problem, H100).seconds < predict(wide, problem, H100).seconds
    assert select(LARGE, H100, candidates=get_kernels_to_build()).kernel.config.B_r == 128


# ---------------------------------------------------------------------- float32 outputs, some SMs
@pytest.mark.parametrize("d_head", [64, 72, 128, 192, 256])
@pytest.mark.parametrize("device", ["H100", "H200", "A100", "RTX4090"])
@pytest.mark.parametrize("lengths", [(4096, 4096), (1, 8192), (70, 300)])
def test_float32_outputs_are_those_of_kernels_that_split_keys(device, lengths, d_head):
    for features in ({}, {"right": 0}, {"left": 100, "right": 7}, {"varlen": True, "sinks": True}):
        problem = AttentionProblem(
            DType.BF16, 2, *lengths, 8, 2, d_head, d_head, lse=True, out_float32=True, **features
        )
        choice = select(problem, device_facts(device))
        assert choice.kernel.traits.split
        assert choice.n_splits >= 1
        assert choice.kernel.malformed_reason() is None
        assert "float32 output" in problem.label()
        assert all(r.kernel.traits.split for r in choice.rejected)


def test_a_device_of_which_some_sms_are_used():
    whole = device_facts("H100")
    some = whole.limited_to(66)
    assert (some.sm_count, some.mma_flops) == (66, whole.mma_flops / 2)
    assert (some.dram_bandwidth, some.name) == (whole.dram_bandwidth, whole.name)
    problem = AttentionProblem(DType.BF16, 4, 4096, 4096, 16, 16, 128, 128, right=0)
    half = dataclasses.replace(problem, n_sms=66)
    kernel = select(problem, whole).kernel
    assert predict(kernel, problem, some).seconds > 1.8 * predict(kernel, problem, whole).seconds
    assert isinstance(select(half, whole).kernel.config, HopperForwardKernelConfig)
    assert "on 66 SMs" in half.label()
    assert select(dataclasses.replace(problem, n_sms=132), whole).kernel == kernel


@pytest.mark.parametrize("n_sms", [1, 2, 5])
def test_a_limit_of_sms_holds_where_no_default_can_keep_it(n_sms):
    """The kernel that runs is the one that is explained; a limit is none of the Ampere family's."""
    for masks in ({}, {"right": 0}):
        problem = AttentionProblem(DType.BF16, 2, 2048, 2048, 8, 2, 128, 128, n_sms=n_sms, **masks)
        found = select(problem, H200, explained=False)
        assert found.kernel == select(problem, H200).kernel
        assert family_of(found.kernel).name == "hopper"
        assert n_sms > 1 or not found.kernel.config.paired_blocks
        unreached = dataclasses.replace(problem, tma_obstacle="q has a stride of 2")
        for explained in (False, True):
            with pytest.raises(NoKernelError, match=f"no launch keeps to n_sms={n_sms}"):
                select(unreached, H200, explained=explained)
