"""Times context-parallel attention beside one GPU, with bytes, overlap and errors. One process a GPU:

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 benchmarks/context_parallel.py --json FILE

A row's time is that of the slowest rank. ``efficiency`` is the time of one GPU for the whole sequence over
the number of ranks times a row's time. Each method is run again without its messages: what is longer with
them is what no computation hides. Gradients are timed with equal bits in every run and without, each beside
one GPU that promises the same. ``--profile`` writes when each kernel of one call ran, messages and
computation, ``--peers`` times other libraries' context parallelism beside. The file is written anew after
each row, so that one that is cut has what was done.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from context_parallel_overlap import overlap, spans_of
from context_parallel_peers import PEERS
from context_parallel_report import ONE, Case, Pass, Report, Times
from torch import Tensor

import flash_attention
from flash_attention import distributed as cp
from flash_attention.call import Mask
from flash_attention.distributed import cost, transport

public = sys.modules["flash_attention.distributed.attention"]

METHODS = ("all_gather", "ring", "ulysses")
AHEAD = 8_000_000  # cycles for which the GPU waits, so that the host is ahead of it


class Silent(transport.Transport):
    """A transport that brings nothing: what is left is the computation."""

    def start(self, sends: Any, receives: Any) -> transport.Pending:
        return transport.Pending(self, (), [])


class Counting(transport.Transport):
    """A transport that adds up what it sends."""

    total = 0

    def start(self, sends: Any, receives: Any) -> transport.Pending:
        before = self.sent
        pending = super().start(sends, receives)
        Counting.total += self.sent - before
        return pending


def times(call: Callable[[], object], rounds: int) -> Times:
    for _ in range(3):
        call()
    found = []
    meeting = torch.zeros(1, device="cuda")
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(AHEAD)
        dist.all_reduce(meeting)
        start = time.perf_counter()
        begin.record()
        call()
        end.record()
        host = 1e3 * (time.perf_counter() - start)
        torch.cuda.synchronize()
        slowest = torch.tensor([begin.elapsed_time(end), host], device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(slowest.tolist())
    gpu, hosts = ([round_[i] for round_ in found] for i in (0, 1))
    return Times(statistics.median(gpu), gpu, statistics.median(hosts))


def passes(
    call: Callable[..., Any], tensors: list[Tensor], dout: Tensor, backward: bool
) -> Callable[[], Any]:
    """One call, or one call and its gradients."""
    if not backward:
        return torch.no_grad()(lambda: call(*tensors))
    inputs = [x.detach().requires_grad_() for x in tensors]
    return lambda: torch.autograd.grad(call(*inputs), inputs, dout)


def measure(options: argparse.Namespace) -> None:
    report = Report(options)
    passes_ = [Pass(False, False)]
    if options.backward:
        passes_ += [Pass(True, False)] + ([Pass(True, True)] if options.equal_bits else [])
    whole = []
    for total, window in [(n, w) for n in options.tokens for w in options.windows]:
        case = Case(options, total, window)
        for which in passes_:
            _one_gpu(report, case, which)
            for name, method, reserved in _variants(options, which):
                _method(report, case, which, name, method, reserved)
        if window is None:
            whole.append(case)
    # A profiler may slow down what is timed after it, and a peer that fails may leave messages behind.
    if options.profile:
        for which in passes_[:2]:
            for method in ("all_gather", "ring"):
                _profile(report, whole[0], which, method)
    if options.peers:
        for name in PEERS:
            all(_peer(report, case, which, name) for case in whole for which in passes_[:2])


def _variants(options: argparse.Namespace, which: Pass) -> list[tuple[str, Any, int]]:
    """(layout, method, reserved SMs): the first number for all methods, the others for forward rings."""
    first, *others = options.reserved_sms
    found = [(layout, method, first) for layout in options.layouts for method in options.methods]
    if "ring" in options.methods and not which.backward:
        found += [(options.layouts[0], "ring", number) for number in others]
    return found


def _one_gpu(report: Report, case: Case, which: Pass) -> None:
    def call(*x: Tensor) -> Any:
        return flash_attention.attention(*x, deterministic=which.equal_bits, **case.masks)

    found = times(passes(call, [case.q, case.k, case.v], case.dout, which.backward), report.options.rounds)
    case.single[which] = found.median
    report.row(case, which, ONE, "kernel", found)


def _run(
    report: Report, case: Case, which: Pass, layout: cp.Layout, method: str, reserved: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A pass of this rank's rows, and its call alone."""
    local = [layout.shard(x, report.rank) for x in case.tensors]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return cp.attention(
            q, k, v, layout=layout, method=method, reserved_sms=reserved, deterministic=which.equal_bits,  # type: ignore[arg-type]
            **case.masks,
        )  # fmt: skip

    return passes(call, local[:3], local[3], which.backward), lambda: call(*local[:3])


def _method(report: Report, case: Case, which: Pass, name: str, method: Any, reserved: int) -> None:
    window = (case.masks["window"][0] or 0,) * (name == "windowed")
    layout = getattr(cp.Layout, name)(case.total, report.world, *window)
    run, call = _run(report, case, which, layout, method, reserved)
    error = case.error(call(), layout, report.rank)
    rounds, usual = report.options.rounds, reserved == report.options.reserved_sms[0]
    found = times(run, rounds)
    more = {}
    if usual and not which.equal_bits:
        compute = _with(Silent, lambda: times(run, rounds).median)
        more = {"compute_ms": round(compute, 4), "exposed_ms": round(found.median - compute, 4)}
    Counting.total = 0
    _with(Counting, run)
    most = torch.tensor(Counting.total, device="cuda")
    dist.all_reduce(most, dist.ReduceOp.MAX)
    schedule = cp.Schedule(method, layout, Mask.of(True, case.masks["window"]), case.heads)
    predicted = [cost.predict(schedule, case.sizes, backward=b) for b in (False, True)[: 1 + which.backward]]
    report.row(
        case, which, f"{name} {method}" + ("" if usual else f", {reserved} SMs reserved"), "kernel", found,
        **more, megabytes_sent=round(int(most) / 1e6, 3),
        megabytes_predicted=round(cost.most_sent(schedule, case.sizes, backward=which.backward) / 1e6, 3),
        predicted_ms=round(1e3 * sum(p.seconds for p in predicted), 3), error=error,
    )  # fmt: skip


def _profile(report: Report, case: Case, which: Pass, method: str) -> None:
    layout = cp.Layout.zigzag(case.total, report.world)
    run, _ = _run(report, case, which, layout, method, report.options.reserved_sms[0])
    run()
    torch.cuda.synchronize()
    dist.barrier()
    own = overlap(spans_of(run))
    every: list[Any] = [None] * report.world
    dist.all_gather_object(every, own)
    place = {"implementation": f"zigzag {method}", "tokens": case.total, "variant": which.label}
    report.profiles.append({**place, "ranks": every})
    figures = {key: value for key, value in own.items() if key != "kernels"}
    report.say(f"profile of {place}: {figures}")


def _peer(report: Report, case: Case, which: Pass, name: str) -> bool:
    """Whether a peer runs, and so was timed."""
    layout = cp.Layout.zigzag(case.total, report.world)
    try:
        with PEERS[name](layout, report.rank, case.tensors) as peer:
            out = peer.call(peer.q, peer.k, peer.v).detach()
            error = case.error(out.transpose(1, 2) if peer.rows_in == 2 else out, layout, report.rank)
            run = passes(peer.call, [peer.q, peer.k, peer.v], peer.dout, which.backward)
            found = times(run, report.options.rounds)
    except Exception as error_:
        lines = str(error_).splitlines() or [""]
        report.say(f"{name} is not timed: {type(error_).__name__}: {lines[0][:200]}")
        return False
    report.row(case, which, name, "peer", found, error=error)
    return True


def _with(kind: type[transport.Transport], call: Callable[[], Any]) -> Any:
    """What a call returns whose messages travel by another kind of transport."""
    public.__dict__["Transport"] = kind
    try:
        return call()
    finally:
        public.__dict__["Transport"] = transport.Transport


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
    parser.add_argument("--layouts", nargs="+", default=["zigzag"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--reserved-sms", type=int, nargs="+", default=[public.RESERVED_SMS],
        help="for all methods; more than one: a forward ring is timed with each of them",
    )  # fmt: skip
    parser.add_argument("--backward", action="store_true", help="also with gradients")
    parser.add_argument("--equal-bits", action="store_true", help="also with gradients of equal bits")
    parser.add_argument("--profile", action="store_true", help="also what one call's messages are hidden by")
    parser.add_argument("--peers", action="store_true", help="also PyTorch's and ring-flash-attention")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    measure(options)
    print(f"rank {dist.get_rank()} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
