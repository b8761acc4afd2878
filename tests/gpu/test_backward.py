"""Backward kernels of every family over the options of a call, against float64 and eager PyTorch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from gradient_calls import GRADIENTS, Call, Case, problem_of_case

import flash_attention
from flash_helpers.kernel_configs import KNOWN_DEVICES, BackwardConfig, BackwardKernel, DType
from flash_helpers.kernels.direction import Direction
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.problem import BACKWARD
from flash_helpers.select.candidates import holds, kernel_for, unable_reason
from flash_helpers.test.gradients import check_gradients, run_gradients

CASES = {
    "plain": Case(),
    "odd lengths": Case(q=113, k=259),
    "one key": Case(k=1),
    "one query": Case(q=1, k=300),
    "causal": Case(options={"causal": True}),
    "causal, more keys": Case(q=70, k=330, options={"causal": True}),
    "causal, fewer keys": Case(q=330, k=70, options={"causal": True}),
    "window": Case(q=300, k=300, options={"window": (40, 9)}),
    "window to the left, causal": Case(q=280, k=300, options={"window": (65, None), "causal": True}),
    "window far from most keys": Case(q=64, k=500, options={"window": (20, 0)}),
    "soft cap": Case(options={"softcap": 3.0}),
    "soft cap, causal": Case(options={"softcap": 3.0, "causal": True}),
    "negative scale": Case(options={"softmax_scale": -0.1}),
    "scale of 0, causal": Case(options={"softmax_scale": 0.0, "causal": True}),
    "sinks": Case(sinks=True, dlse=True),
    "grouped heads": Case(heads=(6, 1), options={"causal": True}),
    "heads of their own": Case(heads=(3, 3), dlse=True),
    "gradient of the LSE": Case(dlse=True, options={"causal": True}),
    "cut heads": Case(d=(40, 56), options={"causal": True}),
    "cut keys": Case(d=(24, 0)),
    "packed": Case(q=(100, 1, 0, 190), k=(60, 200, 30, 190)),
    "packed, causal": Case(q=(100, 1, 0, 190), k=(60, 200, 30, 250), dlse=True, options={"causal": True}),
    "packed, everything": Case(
        q=(150, 31, 64), k=(90, 131, 64), heads=(4, 2), d=(56, 40), sinks=True, dlse=True,
        options={"window": (50, None), "causal": True, "softcap": 2.0},
    ),
    "keys in use": Case(q=90, k=300, used=(300, 17), options={"causal": True}),
}  # fmt: skip
FIRST = [min(d.built(), key=lambda kernel: kernel.config.d_head).config for d in directions(BACKWARD)]

EACH_SUM = [  # the smallest kernel of each family and each way of summing dQ
    min(same, key=lambda config: config.d_head)
    for d in directions(BACKWARD)
    for same in [[k.config for k in d.built() if k.config.deterministic == x] for x in (False, True)]
]


def _kernels() -> list[object]:
    """Every case with the kernels that a family chooses for it, each element type and sum of dQ in turn; the
    plain and the causal cases with all kernels that are built."""
    found = []
    for direction, (name, case) in itertools.product(directions(BACKWARD), CASES.items()):
        configs = list(dict.fromkeys(kernel.config for kernel in direction.built()))
        if name not in ("plain", "causal", "packed, causal"):
            chosen = {c for dtype in DType for c in _chosen(direction, case, dtype)}
            configs = sorted(chosen) or [config for config in configs if config.d_head <= 128][:2]
        for config in configs:
            d = case.sizes(config.d_head, config.d_head_v)
            problem = problem_of_case(case, config.dtype, d)
            if holds(config, d) and unable_reason(config, problem, [config]) is None:
                kernel = kernel_for(config, problem)
                found.append(pytest.param(name, kernel, id=f"{name}-{kernel.short_form()}"))
    return found


def _chosen(direction: Direction, case: Case, dtype: DType) -> Iterator[BackwardConfig]:
    """What a family runs on an H200 where nothing was measured."""
    for deterministic, d_head in ((False, 128), (True, 64)):
        problem = problem_of_case(case, dtype, case.sizes(d_head, d_head))
        problem = dataclasses.replace(problem, deterministic=deterministic)
        if (answer := direction.defaults(problem, KNOWN_DEVICES["H200"])) is not None:
            yield answer.whole[0]


def _skip_unable(kernel: BackwardKernel) -> None:
    from flash_attention.backends.cuda import device_facts_of

    if reason := kernel.infeasible_reason(device_facts_of()):
        pytest.skip(reason)


@pytest.mark.parametrize(("name", "kernel"), _kernels())
def test_gradients(name: str, kernel: BackwardKernel) -> None:
    _skip_unable(kernel)
    case, config = CASES[name], kernel.config
    call = Call(case, config.dtype, case.sizes(config.d_head, config.d_head_v))
    call.check(run_gradients(call.backward(), config))


@pytest.mark.parametrize("config", FIRST, ids=lambda config: config.short_form())
def test_only_what_is_wanted_is_written_and_is_the_same(config) -> None:
    _skip_unable(BackwardKernel(config))
    case = CASES["packed, everything"]
    if not config.deterministic:
        pytest.skip("bits differ between two calls")
    call = Call(case, config.dtype, case.sizes(config.d_head, config.d_head_v))
    every = run_gradients(call.backward(), config)
    for wanted in (("dq",), ("dk",), ("dv",), ("dsinks",), ("dk", "dv"), ("dq", "dsinks")):
        some = run_gradients(call.backward(wanted), config)
        assert set(some) == set(wanted)
        for name, gradient in some.items():
            assert torch.equal(gradient, every[name]), name


@pytest.mark.parametrize(
    "config",
    [k.config for d in directions(BACKWARD) for k in d.built() if k.config.deterministic],
    ids=lambda config: config.short_form(),
)
def test_a_deterministic_kernel_repeats_its_bits(config) -> None:
    _skip_unable(BackwardKernel(config))
    case = Case(q=500, k=700, batch=3, dlse=True, options={"causal": True})
    call = Call(case, config.dtype, (config.d_head, config.d_head_v))
    first = run_gradients(call.backward(deterministic=True), config)
    busy = torch.cuda.Stream()
    for _ in range(20):
        with torch.cuda.stream(busy):
            torch.randn(1 << 20, device="cuda").sort()
        again = run_gradients(call.backward(deterministic=True), config)
        for name, gradient in again.items():
            assert torch.equal(gradient, first[name]), name


def _requested(when: str) -> int:
    """Bytes that were asked for: the allocator may hand out a larger block that it had, whole."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


@pytest.mark.parametrize("seq_len", [2048, 80])
@pytest.mark.parametrize("config", EACH_SUM, ids=lambda config: config.short_form())
def test_memory_beside_the_gradients(config, seq_len: int) -> None:
    """At most a float32 dQ and 8 bytes a row and head, and nothing stays (contract C46)."""
    _skip_unable(BackwardKernel(config))
    call = Call(Case(q=seq_len, k=seq_len, heads=(8, 8)), config.dtype, (config.d_head, config.d_head_v))
    tensors = (call.dout, call.q, call.k, call.v, call.out, call.lse)
    flash_attention.backward(config, *tensors)  # builds and loads
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = _requested("current")
    found = flash_attention.backward(config, *tensors)
    torch.cuda.synchronize()
    peak, after = _requested("peak") - before, _requested("current") - before
    made = sum(x.numel() * x.element_size() for x in found)
    rows = 2 * 8 * seq_len
    assert peak <= made + rows * (4 * config.d_head + 8) + 4096
    assert after <= made + 4096


@pytest.mark.parametrize("config", FIRST, ids=lambda config: config.short_form())
def test_a_loss_of_the_lse_alone_gives_v_no_gradient(config) -> None:
    _skip_unable(BackwardKernel(config))
    call = Call(Case(dlse=True, options={"causal": True}), config.dtype, (config.d_head, config.d_head_v))
    call.dout.zero_()
    found = run_gradients(call.backward(), config)
    assert not found["dv"].any()
    call.check(found)


@pytest.mark.parametrize("config", FIRST, ids=lambda config: config.short_form())
def test_keys_and_queries_that_nobody_sees_get_zeros(config) -> None:
    """Whole tiles of them hold NaN: no kernel reads these."""
    _skip_unable(BackwardKernel(config))
    case = Case(q=64, k=900, options={"window": (20, 0)})
    call = Call(case, config.dtype, (config.d_head, config.d_head_v))
    clean = run_gradients(call.backward(), config)
    call.k[:, :512], call.v[:, :512] = math.nan, math.nan  # the first query stands at 836
    found = run_gradients(call.backward(), config)
    for name in ("dk", "dv"):
        assert not found[name][:, :512].any()
    for name in GRADIENTS:
        torch.testing.assert_close(found[name], clean[name], rtol=0, atol=1e-3)


@pytest.mark.parametrize("config", FIRST, ids=lambda config: config.short_form())
@pytest.mark.parametrize("layout", ["packed qkv", "heads first", "expanded", "odd rows", "reversed columns"])
def test_backward_takes_any_strides(config, layout: str) -> None:
    _skip_unable(BackwardKernel(config))
    d, dtype = config.d_head, config.dtype.to_torch_dtype()
    if config.d_head_v != d:
        pytest.skip("the layouts are of one head size")
    generator = torch.Generator(device="cuda").manual_seed(2)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    if layout == "packed qkv":
        q, k, v = randn(2, 150, 3, 4, d).unbind(2)
    elif layout == "heads first":
        q, k, v = (randn(2, 4, 150, d).transpose(1, 2) for _ in range(3))
    elif layout == "odd rows":
        q, k, v = (randn(2, 150, 4, d + 3)[..., :d] for _ in range(3))
    elif layout == "reversed columns":
        q, k, v = (randn(2, 150, d, 4).transpose(2, 3) for _ in range(3))
    else:
        q, k, v = randn(2, 150, 4, d), *(randn(1, 150, 1, d).expand(2, -1, 4, -1) for _ in range(2))
    o, lse = flash_attention.attention(q, k, v, causal=True, return_lse=True)
    dout = {"expanded": randn(1, 1, 1, 1).expand(o.shape)}.get(
        layout, randn(2, 4, d, 150).permute(0, 3, 1, 2)
    )
    outputs = {"dq": torch.full((2, 4, 150, d), math.nan, dtype=dtype, device="cuda").transpose(1, 2)}
    found = flash_attention.backward(config, dout, q, k, v, o, lse, causal=True, **outputs)
    assert found[0] is outputs["dq"]
    check_gradients(dict(zip(GRADIENTS, found, strict=True)), q, k, v, dout, out=o, causal=True)


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_the_library_chooses_a_kernel_for_every_option(dtype: DType, deterministic: bool) -> None:
    for name in ("causal", "window", "soft cap", "cut heads", "packed, everything", "keys in use"):
        case = CASES[name]
        call = Call(case, dtype, case.sizes(128, 128))
        call.check(run_gradients(call.backward(deterministic=deterministic)))


@pytest.mark.parametrize("config", FIRST, ids=lambda config: config.short_form())
def test_backward_timed_gives_the_gradients_and_a_time(config) -> None:
    _skip_unable(BackwardKernel(config))
    call = Call(Case(), config.dtype, (config.d_head, config.d_head_v))
    arguments = (call.dout, call.q, call.k, call.v, call.out, call.lse)
    found, milliseconds = flash_attention.backward_timed(config, *arguments)
    assert milliseconds > 0
    named = dict(zip(GRADIENTS, found, strict=True))
    check_gradients(named, call.q, call.k, call.v, call.dout, out=call.out)
