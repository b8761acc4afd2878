"""Times what each rank of context-parallel attention computes, on one GPU and without other processes.

    python benchmarks/context_parallel_rank.py --json FILE

A rank's program runs as it does between GPUs, but for its messages: what other ranks would send is copied
from tensors of this GPU on a stream of its own, behind a pause as long as a link of ``Rates`` would take. A
row's time is that of the slowest rank; ``efficiency`` is the time of one call for the whole sequence over the
number of ranks times that. It is predicted, not measured: no message has crossed a link. ``without_link`` is
likewise without pauses. Gradients are timed with equal bits in every run and without, each beside one call
that promises the same.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flash_attention
from flash_attention.call import Mask
from flash_attention.distributed import Layout, Rates
from flash_attention.distributed.engine import Plan
from flash_attention.distributed.function import ContextParallel
from flash_attention.distributed.heads import Heads
from flash_attention.distributed.pairs import Arithmetic
from flash_attention.distributed.schedule import Schedule
from flash_attention.distributed.transport import Parcel
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.result_file import ResultFile

METHOD = (
    "median over rounds of the time between two CUDA events behind a pause, in which the host launches, the "
    "largest of all ranks, which run one after the other on one GPU; messages are copies behind a pause as "
    "long as a link would take"
)
RESERVED_SMS = 8
AHEAD = 8_000_000  # cycles for which the GPU waits, so that the host is ahead of it as it is in a model


class Coming(NamedTuple):
    """Messages that travel until an event."""

    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class Emulated:
    """A transport that brings copies of tensors that are here, as late as a link would.

    Args:
        rank: of the program.
        layout: which rank holds which rows.
        whole: k and v of all rows.
        rates: those of a link; None: messages take no time.
        clock: cycles a second of the GPU, of which a pause is counted in.
    """

    def __init__(
        self, rank: int, layout: Layout, whole: Sequence[Tensor], rates: Rates | None, clock: float
    ) -> None:
        self.rank, self._rates, self._clock = rank, rates, clock
        self._stream = torch.cuda.Stream()
        self._shards = [
            [layout.shard(x, owner) for x in whole] if owner != rank else [] for owner in range(layout.world)
        ]

    def start(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Coming:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._rates is not None:
                largest = max(sum(x.nbytes for p in ps for x in p.tensors) for ps in (sends, receives))
                seconds = self._rates.latency + largest / self._rates.link
                torch.cuda._sleep(int(seconds * self._clock))
            for message, tensors in receives:
                if message.payload == "kv":
                    self._bring(message.owner, message.rows, message.heads_kv, tensors)
            event = torch.cuda.Event()
            event.record()
        return Coming(event)

    def _bring(
        self, owner: int, rows: Iterable[range], heads: tuple[int, int] | None, into: Sequence[Tensor]
    ) -> None:
        places = iter(into)
        for of_range in rows:
            for x in self._shards[owner]:
                part = x[:, of_range.start : of_range.stop, slice(*heads) if heads else slice(None)]
                next(places).copy_(part)


def times(call: Callable[[], object], rounds: int) -> tuple[float, list[float]]:
    """Milliseconds: the median over rounds, and all of them."""
    for _ in range(2):
        call()
    found = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found), found


def passes(
    call: Callable[..., Any], tensors: Sequence[Tensor], dout: Tensor, backward: bool
) -> Callable[[], Any]:
    """One call, or one call and its gradients."""
    if not backward:
        return torch.no_grad()(lambda: call(*tensors))
    inputs = [x.detach().requires_grad_() for x in tensors]
    return lambda: torch.autograd.grad(call(*inputs), inputs, dout)


def kernels_of(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """What one run launches: names, microseconds and numbers, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name[:120], []).append(event.time_range.elapsed_us())
    rows = [
        {"kernel": name, "us": round(sum(us), 1), "launches": len(us)} for name, us in found.items() if us
    ]
    return sorted(rows, key=lambda row: -float(str(row["us"])))


class Case:
    """One problem, on the whole sequence and as each rank has it."""

    def __init__(self, options: argparse.Namespace, layout: str, total: int, window: int | None) -> None:
        self.options, self.total, self.window = options, total, window
        generator = torch.Generator("cuda").manual_seed(0)
        counts = (options.heads, options.heads_kv, options.heads_kv, options.heads)
        self.q, self.k, self.v, self.dout = (
            torch.randn(1, total, n, options.d_head, dtype=torch.bfloat16, device="cuda", generator=generator)
            for n in counts
        )
        self.window_pair = (window, 0) if window is not None else (None, None)
        sizes = (total, options.world) if layout != "windowed" else (total, options.world, window or 0)
        self.layout = getattr(Layout, layout)(*sizes)

    @property
    def problem(self) -> dict[str, Any]:
        o = self.options
        found: dict[str, Any] = dict(
            dtype="BF16", batch=1, n_heads=o.heads, n_heads_kv=o.heads_kv, seq_len_q=self.total,
            seq_len_k=self.total, d_head=o.d_head, causal=True,
        )  # fmt: skip
        return found if self.window is None else {**found, "window": self.window}

    def single(self, backward: bool, deterministic: bool) -> Callable[[], Any]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return flash_attention.attention(
                q, k, v, causal=True, window=self.window_pair, deterministic=deterministic
            )

        return passes(call, [self.q, self.k, self.v], self.dout, backward)

    def of_rank(
        self, rank: int, method: str, backward: bool, deterministic: bool, rates: Rates | None
    ) -> tuple[Callable[[], Any], Callable[..., Any]]:
        """A rank's pass, and its call."""
        o = self.options
        schedule = Schedule(
            method, self.layout, Mask.of(True, self.window_pair), Heads(o.heads, o.heads_kv)  # type: ignore[arg-type]
        )  # fmt: skip
        transport: Any = Emulated(rank, self.layout, (self.k, self.v), rates, o.clock)
        alone = Arithmetic(o.d_head**-0.5, deterministic=deterministic)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        few = Arithmetic(o.d_head**-0.5, deterministic=deterministic, n_sms=sms - RESERVED_SMS)
        plan = Plan(schedule, transport, few, alone)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return ContextParallel.apply(plan, q, k, v, None)[0]  # type: ignore[no-untyped-call]

        local = [self.layout.shard(x, rank) for x in (self.q, self.k, self.v, self.dout)]
        return passes(call, local[:3], local[3], backward), lambda: call(*local[:3])


def measure(options: argparse.Namespace) -> ResultFile:
    what = f"what each of {options.world} ranks computes of context-parallel attention, on one GPU"
    file = ResultFile("context_parallel_rank", what, method=METHOD)
    file.environment = environment(torch.device("cuda", 0))
    details: list[dict[str, Any]] = []
    rates = Rates()
    file.facts = {
        "link": {"bytes_a_second": rates.link, "latency_s": rates.latency, "emulated": True},
        "reserved_sms": RESERVED_SMS,
        "rows": details,
    }
    for total in options.tokens:
        for window in options.windows:
            for layout in options.layouts:
                case = Case(options, layout, total, window)
                for backward, deterministic in ((False, False), (True, False), (True, True)):
                    _measure_one(options, file, details, case, backward, deterministic, rates)
    return file


def _measure_one(
    options: argparse.Namespace,
    file: ResultFile,
    details: list[dict[str, Any]],
    case: Case,
    backward: bool,
    deterministic: bool,
    rates: Rates,
) -> None:
    which = "forward and backward" if backward else "forward"
    which += ", deterministic" if deterministic else ""

    def note(name: str, median: float, rounds: list[float], **more: Any) -> None:
        rounds = sorted(rounds)
        spread = {"p20": rounds[len(rounds) // 5], "p80": rounds[-1 - len(rounds) // 5]}
        hot = {"median": median, **spread, "rounds": len(rounds)}
        file.rows.append(
            {
                "implementation": name,
                "kind": "kernel",
                "problem": case.problem,
                "milliseconds": {"hot": hot},
                "variant": which,
            }
        )
        details.append(
            {"implementation": name, "tokens": case.total, "window": case.window, "variant": which, **more}
        )
        rest = "  ".join(f"{key} {value}" for key, value in more.items() if key != "kernels")
        print(
            f"{which:<37}{case.total:>7} {case.window or '-':>5} {name:<19}{median:>9.3f} ms  {rest}",
            flush=True,
        )

    single, rounds = times(case.single(backward, deterministic), options.rounds)
    note("one GPU", single, rounds)
    for method in options.methods:
        slowest: list[float] = []
        kernels, without, error = {}, 0.0, 0.0
        by_rank = []
        for rank in range(options.world):
            free, call = case.of_rank(rank, method, backward, deterministic, None)
            without = max(without, times(free, options.rounds)[0])
            run, _ = case.of_rank(rank, method, backward, deterministic, rates)
            median, rounds = times(run, options.rounds)
            by_rank.append(round(median, 4))
            if not slowest or median > statistics.median(slowest):
                slowest = rounds
            if options.kernels:
                kernels[str(rank)] = kernels_of(free)[: options.kernels]
            if not backward:
                error = max(error, _error(case, rank, call))
        worst = statistics.median(slowest)
        more: dict[str, Any] = {
            "efficiency": round(single / (options.world * worst), 4), "without_link_ms": round(without, 4),
            "efficiency_without_link": round(single / (options.world * without), 4), "ranks_ms": by_rank,
        }  # fmt: skip
        if not backward:
            more["error"] = float(f"{error:.3g}")
        name = f"{case.layout.name} {method}"
        note(name, worst, slowest, **more, **({"kernels": kernels} if kernels else {}))


@torch.no_grad()
def _error(case: Case, rank: int, call: Callable[..., Any]) -> float:
    """The relative difference of a rank's rows from those of one call."""
    wanted = case.layout.shard(
        flash_attention.attention(case.q, case.k, case.v, causal=True, window=case.window_pair), rank
    ).float()
    return float((call().float() - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[65536, 16384])
    parser.add_argument(
        "--windows", type=lambda x: None if x == "none" else int(x), nargs="+", default=[None, 4096]
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--d-head", type=int, default=128)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", default=["zigzag"], help="names of Layout's constructors")
    parser.add_argument("--methods", nargs="+", default=["all_gather", "ring"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--kernels", type=int, default=12, help="so many kernels of a rank are listed; 0: none"
    )
    parser.add_argument("--clock", type=float, default=1.98e9, help="cycles a second that a pause counts in")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    file = measure(options)
    if options.json:
        file.save(options.json)


if __name__ == "__main__":
    main()
