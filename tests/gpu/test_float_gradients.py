"""Gradients that kernels leave in float32, for sums of several calls: those that they round else."""

from __future__ import annotations

import pytest
import torch
from gradient_calls import GRADIENTS, Call, Case

from flash_helpers.kernel_configs import BackwardConfig, BackwardKernel, DType
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.problem import BACKWARD
from flash_helpers.kernels.traits import BackwardTraits
from flash_helpers.test.gradients import run_gradients

CASES = {
    "plain": Case(),
    "odd lengths": Case(q=113, k=259, heads=(6, 1), dlse=True),
    "one query": Case(q=1, k=300),
    "causal": Case(options={"causal": True}),
    "causal, fewer keys": Case(q=330, k=70, options={"causal": True}),
    "window far from most keys": Case(q=64, k=500, options={"window": (20, 0)}),
    "cut heads": Case(d=(40, 56), options={"causal": True}),
}
FLOATS = (GRADIENTS, ("dq",), ("dk", "dv"))


def _configs() -> list[BackwardConfig]:
    """The smallest of each family for each way of summing dQ; not of those that can't leave it in float32."""
    found: dict[tuple[str, str], BackwardConfig] = {}
    traits = BackwardTraits(float_query_gradients=True)
    for direction in directions(BACKWARD):
        for config in sorted((k.config for k in direction.built()), key=lambda c: (c.d_head, c.d_head_v)):
            way = getattr(config, "dq_output", None) or getattr(config, "dq_sum", None)
            if config.dtype is DType.BF16 and config.malformed_reason(traits) is None:
                found.setdefault((direction.family.name, str(way)), config)
    return list(found.values())


CONFIGS = _configs()


def test_each_way_of_summing_dq_is_there() -> None:
    assert len(CONFIGS) >= 5, [config.short_form() for config in CONFIGS]


@pytest.mark.parametrize("floats", FLOATS, ids="+".join)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.short_form())
def test_float_gradients_are_those_that_were_rounded(
    config: BackwardConfig, name: str, floats: tuple[str, ...]
) -> None:
    from flash_attention.backends.cuda import device_facts_of

    if reason := BackwardKernel(config).infeasible_reason(device_facts_of()):
        pytest.skip(reason)
    case = CASES[name]
    d = case.sizes(config.d_head, config.d_head_v)
    call = Call(case, config.dtype, d)
    rounded = run_gradients(call.backward(deterministic=config.deterministic), config)
    call.check(rounded)
    found = run_gradients(call.backward(deterministic=config.deterministic, floats=floats), config)
    call.check(found)
    for gradient in GRADIENTS:
        x, y = found[gradient], rounded[gradient]
        assert x.dtype is (torch.float32 if gradient in floats else y.dtype)
        if config.deterministic or gradient != "dq":
            assert torch.equal(x.to(y.dtype), y), gradient
        if gradient in floats and y.any():
            assert (x != x.to(y.dtype).float()).any(), f"{gradient} is rounded"
