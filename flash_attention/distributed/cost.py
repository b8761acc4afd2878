"""How long a schedule takes, from its bytes and FLOP and a few rates, and which method is the quickest.

A rank's step takes as long as the longer of its messages and its tiles; a rank takes the sum of its steps,
and a method as long as its slowest rank. Messages cost a latency an exchange and their bytes over the rate of
a link, in the busier direction; an exchange begins when the one before has ended, and with its step, or where
all keys travel at once as soon as it can. Tiles cost their FLOP over the rate of a kernel and a fixed time a
call; where several compute one query, also three passes over a float32 output, by which results are merged;
and gradients of keys three passes, by which they are added up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property

from flash_attention.checks.options import checked_number
from flash_attention.distributed.schedule import METHODS, Message, Method, Payload, Schedule, Step

SAMPLED = 16  # of more ranks than twice this, about so many are looked at


@dataclass(frozen=True)
class Rates:
    """What predictions rest on. The defaults are of H200s on one NVLink switch.

    Attributes:
        flops: FLOP/s of a forward kernel.
        flops_backward: of a backward kernel.
        link: bytes/s that a rank sends, and receives at the same time.
        latency: seconds that an exchange takes whatever its size.
        call: seconds that a call of a kernel takes whatever its size.
        memory: bytes/s of device memory.
    """

    flops: float = 6e14
    flops_backward: float = 4.5e14
    link: float = 3.1e11
    latency: float = 3e-5
    call: float = 1e-5
    memory: float = 3.5e12

    def __post_init__(self) -> None:
        for f in fields(self):
            rate = checked_number(f"Rates' {f.name}", getattr(self, f.name))
            least_is_0 = f.name in ("latency", "call")
            if not (rate > 0 or (least_is_0 and rate == 0)) or math.isinf(rate):
                raise ValueError(
                    f"Rates' {f.name} is {rate}; it must be a finite number, "
                    f"{'at least' if least_is_0 else 'above'} 0"
                )


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call that no schedule knows.

    Attributes:
        batch: batch items.
        d_head: head size of queries and keys.
        d_head_v: of values.
        itemsize: bytes of an element.
    """

    batch: int
    d_head: int
    d_head_v: int
    itemsize: int = 2


@dataclass(frozen=True)
class Prediction:
    """What one pass of a method costs. Predicted, not measured.

    Attributes:
        seconds: of the slowest rank.
        compute: seconds in which that rank's tiles run.
        exposed: seconds in which it waits for messages alone.
        sent: most bytes that a rank sends.
        received: most bytes that a rank receives.
        flop: most FLOP of a rank.
        held: most bytes of others' keys and values that a rank holds at a time.
        calls: most calls of kernels of a rank.
    """

    seconds: float
    compute: float
    exposed: float
    sent: int
    received: int
    flop: float
    held: int
    calls: int


def bytes_of(message: Message, schedule: Schedule, sizes: Sizes) -> int:
    """What a message weighs."""
    heads = message.heads[1] - message.heads[0] if message.heads else schedule.heads.q
    kv = schedule.heads.kv
    if message.heads_kv:
        kv = message.heads_kv[1] - message.heads_kv[0]
    both = sizes.d_head + sizes.d_head_v
    row = {
        "kv": kv * both * sizes.itemsize,
        "dkv": kv * both * 4,
        "qkv": (heads * sizes.d_head + kv * both) * sizes.itemsize,
        "out": heads * (sizes.d_head_v * sizes.itemsize + 4),
        "dout": heads * sizes.d_head_v * sizes.itemsize,
        "dqkv": (heads * sizes.d_head + kv * both) * 4,
    }[message.payload]
    return sizes.batch * message.count * row


def most_sent(schedule: Schedule, sizes: Sizes, *, backward: bool = False) -> int:
    """Most bytes that a rank sends in a call, and in its backward pass where it has one.

    The rank that sends most in one pass need not be the one that sends most in the other: sums of the most of
    each pass are more than any rank sends.
    """
    return max(
        sum(
            bytes_of(message, schedule, sizes)
            for steps in (schedule.forward(rank), schedule.backward(rank) if backward else ())
            for step in steps
            for message in step.sends
        )
        for rank in range(schedule.layout.world)
    )


def predict(
    schedule: Schedule, sizes: Sizes, rates: Rates | None = None, *, backward: bool = False
) -> Prediction:
    """What a pass of a schedule costs on its slowest rank. Of many ranks, some are looked at."""
    rates = rates or Rates()
    world = schedule.layout.world
    ranks = range(world) if world <= 2 * SAMPLED else {*range(0, world, world // SAMPLED), world - 1}
    found = [_of_rank(schedule, rank, sizes, rates, backward) for rank in sorted(ranks)]
    slowest = max(found, key=lambda p: p.seconds)
    return Prediction(
        slowest.seconds, slowest.compute, slowest.exposed,
        *(max(getattr(p, name) for p in found) for name in ("sent", "received", "flop", "held", "calls")),
    )  # fmt: skip


def _of_rank(schedule: Schedule, rank: int, sizes: Sizes, rates: Rates, backward: bool) -> Prediction:
    steps = schedule.backward(rank) if backward else schedule.forward(rank)
    now = link = compute = flop = 0.0  # now: where the tiles are; link: until when it is busy
    sent = received = held = calls = 0
    for step in steps:
        ends = now
        for payloads in _exchanges(schedule):
            sends, receives = (
                sum(bytes_of(m, schedule, sizes) for m in messages if m.payload in payloads)
                for messages in (step.sends, step.receives)
            )
            if not sends and not receives:
                continue
            begins = 0.0 if schedule.at_once and payloads == ("kv",) else now
            link = max(link, begins) + rates.latency + max(sends, receives) / rates.link
            ends = max(ends, link)
            sent, received = sent + sends, received + receives
            if "kv" in payloads:
                held = held + receives if schedule.at_once else max(held, receives)
        work, run = _tiles(step, schedule, rank, sizes, rates, backward)
        now = max(now + run, ends)
        compute += run
        flop += work
        calls += len(step.tiles)
    return Prediction(now, compute, now - compute, sent, received, flop, held, calls)


def _exchanges(schedule: Schedule) -> tuple[tuple[Payload, ...], ...]:
    """The payloads of the messages of a step that travel together."""
    return (("kv",), ("dkv",)) if schedule.at_once else (("kv", "dkv", "qkv", "out", "dout", "dqkv"),)


def _tiles(
    step: Step, schedule: Schedule, rank: int, sizes: Sizes, rates: Rates, backward: bool
) -> tuple[float, float]:
    """FLOP and seconds of a step's tiles."""
    both = sizes.d_head + sizes.d_head_v
    merges = not schedule.coverage(rank).once
    flop = seconds = 0.0
    for tile in step.tiles:
        heads = tile.heads[1] - tile.heads[0] if tile.heads else schedule.heads.q
        of_keys = tile.heads_kv or (0, heads // max(1, schedule.heads.group))
        kv = of_keys[1] - of_keys[0]
        # Forward: Q K^T and P V. Backward: five products, of which three have the size of q's heads.
        products = 2 * sizes.d_head * 3 + 2 * sizes.d_head_v * 2 if backward else 2 * both
        work = float(sizes.batch * heads * tile.pairs * products)
        merged = 0
        if merges:
            merged += heads * len(tile.q) * (sizes.d_head if backward else sizes.d_head_v)
        if backward:
            merged += kv * len(tile.k) * both
        flop += work
        seconds += work / (rates.flops_backward if backward else rates.flops) + rates.call
        seconds += 12 * sizes.batch * merged / rates.memory
    return flop, seconds


# ---------------------------------------------------------------------- the choice
@dataclass(frozen=True)
class MethodChoice:
    """Which method ``attention`` takes for a call, and what every method would cost.

    Attributes:
        schedules: of all methods.
        sizes: of the call.
        rates: what the predictions rest on.
        given: the method that the caller names; None: the quickest.
    """

    schedules: tuple[Schedule, ...]
    sizes: Sizes
    rates: Rates
    given: Method | None = None

    @cached_property
    def predictions(self) -> dict[Method, tuple[Prediction, Prediction]]:
        """Of each method the forward and the backward pass."""
        return {
            s.method: (
                predict(s, self.sizes, self.rates),
                predict(s, self.sizes, self.rates, backward=True),
            )
            for s in self.schedules
        }

    @cached_property
    def seconds(self) -> dict[Method, float]:
        """Predicted time of each method, both passes."""
        return {name: sum(p.seconds for p in passes) for name, passes in self.predictions.items()}

    @cached_property
    def method(self) -> Method:
        """What is taken. The methods are compared in their order; a later one must be quicker by 2 %."""
        if self.given is not None:
            return self.given
        best: Method = METHODS[0]
        for name in METHODS[1:]:
            if self.seconds[name] < 0.98 * self.seconds[best]:
                best = name
        return best

    @property
    def schedule(self) -> Schedule:
        """Of the method that is taken."""
        return next(s for s in self.schedules if s.method == self.method)

    @property
    def reason(self) -> str:
        """Why this method, in a sentence."""
        if self.given is not None:
            return f"{self.given}: the caller names it"
        others = ", ".join(
            f"{name} {self.seconds[name] * 1e3:.3g} ms" for name in METHODS if name != self.method
        )
        return (
            f"{self.method}: predicted {self.seconds[self.method] * 1e3:.3g} ms for forward and backward, "
            f"against {others}"
        )

    def __str__(self) -> str:
        """The reason and a table of the predictions."""
        rates = self.rates
        lines = [
            self.reason,
            f"predicted from {rates.flops:.3g} and {rates.flops_backward:.3g} FLOP/s (forward, backward), "
            f"{rates.link:.3g} bytes/s a link, {rates.latency:.3g} s an exchange, {rates.call:.3g} s a call, "
            f"{rates.memory:.3g} bytes/s of memory; a rank's step takes as long as the longer of its "
            "messages and its tiles",
            f"{'method':<12}{'pass':<10}{'ms':>10}{'compute':>10}{'exposed':>10}{'sent MB':>11}"
            f"{'received':>11}{'held MB':>11}{'GFLOP':>11}{'calls':>7}",
        ]
        for name, passes in self.predictions.items():
            for which, p in zip(("forward", "backward"), passes, strict=True):
                lines.append(
                    f"{name:<12}{which:<10}{p.seconds * 1e3:>10.3f}{p.compute * 1e3:>10.3f}"
                    f"{p.exposed * 1e3:>10.3f}{p.sent / 1e6:>11.2f}{p.received / 1e6:>11.2f}"
                    f"{p.held / 1e6:>11.2f}{p.flop / 1e9:>11.2f}{p.calls:>7}"
                )
        return "\n".join(lines)
