"""The whole path on one device, with ranks as threads: on the CPU, and once more on a GPU where there is one.

On the GPU the tiles run by kernels, for several ranks on one card.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from cases import error
from threads import on_every_rank
from torch import Tensor

import flash_attention
from flash_attention.call import Mask
from flash_attention.distributed import Layout, engine, heads, over_heads, pairs
from flash_attention.distributed.engine import Plan
from flash_attention.distributed.pairs import Arithmetic
from flash_attention.distributed.schedule import METHODS, Heads, Schedule
from flash_attention.distributed.transport import Parcel
from flash_helpers.test.reference import reference, reference_gradients

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
MASKS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {},
    "window": {"causal": True, "window": (70, 0)},
    "both sides, softcap": {"window": (33, 50), "softcap": 4.0},
}

GRADIENTS = ("dq", "dk", "dv")
SUMMED_IN_FLOAT32 = 1.05
"""How much larger an error of several ranks may be than one rank's, as a ratio of root mean squares.

Sums in float32 add some 2^-22 of a gradient to its one rounding of 2^-9, so that the errors differ by chance
alone: of 26,000 numbers whose roundings are independent the ratio scatters by less than 0.01. A second
rounding of as large numbers makes it up to sqrt(2): here 1.11 to 1.30, as P and dS are rounded in any case.
"""

TOTAL = 203
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, TOTAL, heads, 64) for heads in (4, 2, 2, 4)]
    return [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]


@cache
def exact(mask: str) -> tuple[Tensor, Tensor]:
    q, k, v, _ = tensors()
    return reference(q, k, v, sinks=SINKS, **MASKS[mask])


@cache
def exact_gradients(mask: str) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, dout = tensors()
    return reference_gradients(q, k, v, dout, **MASKS[mask])[:3]


def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on heads come in two exchanges, however little work they are."""
    for name in ("LEAST_BLOCKS", "LEAST_KEY_BLOCKS"):
        monkeypatch.setattr(heads, name, 0)


@pytest.fixture(autouse=True)
def _one_thread_a_rank() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_as_exact_as_those_of_one_call(
    device: str, method: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not grow with the ranks. Of 8, heads come in parts."""
    options = MASKS[mask]
    q, k, v, _ = (x.to(device) for x in tensors())
    sinks = SINKS.to(device)
    wanted, wanted_lse = (x.to(device) for x in exact(mask))
    single, single_lse = flash_attention.attention(q, k, v, sinks=sinks, return_lse=True, **options)
    limits = Mask.of(options.get("causal", False), options.get("window", (None, None)))
    arithmetic = Arithmetic(64**-0.5, options.get("softcap", 0.0))
    for world in (2, 8):
        if world == 8:
            in_parts(monkeypatch)
        for layout in (Layout.zigzag(TOTAL, world), Layout.striped(TOTAL, world)):
            schedule = Schedule(method, layout, limits, Heads(4, 2))  # type: ignore[arg-type]

            def forward(plan: Plan, layout: Layout = layout) -> tuple[Tensor, Tensor]:
                own = [layout.shard(x, plan.rank) for x in (q, k, v)]
                if method == "ulysses":
                    return over_heads.forward(plan, *own, sinks)[:2]
                return engine.forward(plan, *own, sinks)

            answers = on_every_rank(schedule, arithmetic, forward)
            out = layout.unshard([answer[0] for answer in answers])
            lse = layout.unshard([answer[1] for answer in answers], 2)
            assert error(out, wanted) <= 1.25 * error(single, wanted), (world, layout.name)
            assert error(lse, wanted_lse) <= 1.25 * error(single_lse, wanted_lse) + 1e-6, (world, layout.name)


def errors_of_gradients(
    device: str, method: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, str], float]:
    """The errors of dq, dk and dv for 1, 2 and 8 ranks, each rounded once to the type of the inputs."""
    options = MASKS[mask]
    q, k, v, dout = (x.to(device) for x in tensors())
    wanted = dict(zip(GRADIENTS, exact_gradients(mask), strict=True))
    limits = Mask.of(options.get("causal", False), options.get("window", (None, None)))
    arithmetic = Arithmetic(64**-0.5, options.get("softcap", 0.0))
    errors = {}
    for world in (1, 2, 8):
        if world == 8:
            in_parts(monkeypatch)
        layout = Layout.zigzag(TOTAL, world)
        schedule = Schedule(method, layout, limits, Heads(4, 2))  # type: ignore[arg-type]

        def both(plan: Plan, layout: Layout = layout) -> tuple[Tensor, ...]:
            own = [layout.shard(x, plan.rank) for x in (q, k, v, dout)]
            if method == "ulysses":
                _, _, kept = over_heads.forward(plan, own[0], own[1], own[2], None)
                return over_heads.backward(plan, own[3], None, kept, (4, 2))[:3]
            out, lse = engine.forward(plan, own[0], own[1], own[2])
            return engine.backward(plan, own[3], None, own[0], own[1], own[2], out, lse)

        answers = on_every_rank(schedule, arithmetic, both)
        for number, name in enumerate(GRADIENTS):
            grad = layout.unshard([answer[number] for answer in answers]).to(q.dtype)
            errors[world, name] = error(grad.cpu(), wanted[name])
    return errors


def growth(errors: dict[tuple[int, str], float], names: tuple[str, ...] = GRADIENTS) -> float:
    """How much larger the worst error of several ranks is than one rank's."""
    return max(errors[world, name] / errors[1, name] for world in (2, 8) for name in names)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_exact(device: str, method: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = errors_of_gradients(device, method, mask, monkeypatch)
    assert growth(errors) <= SUMMED_IN_FLOAT32, errors


# ---------------------------------------------------------------------- what the limit finds
def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def shares_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tile's share of a gradient is rounded before the sum, as a kernel of 16 bits writes it."""
    for name in ("gradient_type", "key_gradient_type"):
        monkeypatch.setattr(pairs, name, lambda x, *_: x.dtype)


def an_lse_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass of several ranks gets a rounded LSE."""
    plain = engine.backward

    def backward(plan: Plan, *given: Any) -> tuple[Tensor, ...]:
        *others, lse = given
        return plain(plan, *others, lse if plan.schedule.layout.world == 1 else rounded(lse))

    monkeypatch.setattr(engine, "backward", backward)


def messages_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of keys are rounded before they are sent back."""
    plain = engine.summed

    def summed(*given: Any) -> Any:
        message, tensors = plain(*given)
        return Parcel(message, tuple(map(rounded, tensors)))

    monkeypatch.setattr(engine, "summed", summed)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("fault", "method"),
    [
        *((shares_of_16_bits, method) for method in METHODS),
        *((fault, method) for fault in (an_lse_of_16_bits, messages_of_16_bits) for method in METHODS[:2]),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_rounding_before_the_sum_is_beyond_the_limit(
    fault: Any, method: str, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    errors = errors_of_gradients("cpu", method, mask, monkeypatch)
    assert growth(errors) > SUMMED_IN_FLOAT32, errors
