"""Times context-parallel attention beside one GPU, with bytes, overlap and errors. One process a GPU:

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 benchmarks/context_parallel.py --json FILE

A row's time is that of the slowest rank. ``efficiency`` is the time of one GPU for the whole sequence over
the number of ranks times a row's time. Each method is run again without its messages: what is longer with
them is what no computation hides. Gradients are timed with equal bits in every run and without, each beside
one GPU that promises the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flash_attention
from flash_attention import distributed as cp
from flash_attention.distributed import cost, transport
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.result_file import ResultFile

public = sys.modules["flash_attention.distributed.attention"]

METHODS = ("all_gather", "ring", "ulysses")
METHOD = (
    "median over rounds of the time between two CUDA events on each rank, the largest of all ranks; the "
    "ranks meet before each round; implementations one after the other in one process"
)


class Silent(transport.Transport):
    """A transport that brings nothing: what is left is the computation."""

    def start(self, sends: Any, receives: Any) -> transport.Pending:
        return transport.Pending(self, (), [])


def times(call: Callable[[], object], rounds: int) -> tuple[float, list[float]]:
    """Milliseconds: the median over rounds of the slowest rank, and all rounds of it."""
    for _ in range(3):
        call()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(float(slowest))
    return statistics.median(found), found


def passes(
    call: Callable[..., Any], tensors: list[Tensor], dout: Tensor, backward: bool
) -> Callable[[], Any]:
    """One call, or one call and its gradients."""
    if not backward:
        return torch.no_grad()(lambda: call(*tensors))
    inputs = [x.detach().requires_grad_() for x in tensors]
    return lambda: torch.autograd.grad(call(*inputs), inputs, dout)


def pytorch(
    layout: cp.Layout, rank: int, q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> Callable[..., Any]:
    """PyTorch's own context parallelism. It takes whole sequences, with a key head for each of q."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    group = q.shape[2] // k.shape[2]
    whole = [q, *(x.repeat_interleave(group, 2) for x in (k, v))]
    buffers = [x.transpose(1, 2).contiguous() for x in whole]

    def run() -> None:
        with (
            torch.no_grad(),
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3),
            sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]),
        ):
            begin.record()
            torch.nn.functional.scaled_dot_product_attention(*buffers, is_causal=causal)
            end.record()

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = []
    for _ in range(6):
        dist.barrier()
        run()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(float(slowest))
    return lambda: found[2:]


def measure(options: argparse.Namespace) -> ResultFile:
    rank, world = dist.get_rank(), dist.get_world_size()
    file = ResultFile("context_parallel", f"context-parallel attention on {world} GPUs", method=METHOD)
    file.environment = {
        **environment(torch.device("cuda", torch.cuda.current_device())), "world": world,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "nvls": os.environ.get("NCCL_NVLS_ENABLE", "default"),
    }  # fmt: skip
    details: list[dict[str, Any]] = []
    file.facts = {"reserved_sms": options.reserved_sms, "rows": details}
    for total, window in [(n, w) for n in options.tokens for w in options.windows]:
        for backward, equal_bits in _passes(options.backward):
            try:
                _measure_one(options, file, details, total, window, backward, equal_bits, rank, world)
            except NotImplementedError as error:
                if rank == 0:
                    print(f"{total} tokens, backward: {error}")
    return file


def _passes(gradients: bool) -> list[tuple[bool, bool]]:
    """(whether gradients are computed, whether they have equal bits in every run)."""
    return [(False, False), *([(True, False), (True, True)] if gradients else [])]


def _measure_one(
    options: argparse.Namespace,
    file: ResultFile,
    details: list[dict[str, Any]],
    total: int,
    window: int | None,
    backward: bool,
    equal_bits: bool,
    rank: int,
    world: int,
) -> None:
    heads, heads_kv, d = options.heads, options.heads_kv, options.d_head
    problem: dict[str, Any] = dict(
        dtype="BF16", batch=1, n_heads=heads, n_heads_kv=heads_kv, seq_len_q=total, seq_len_k=total, d_head=d,
        causal=True,
    )  # fmt: skip
    if window is not None:
        problem["window"] = window
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, total, n, d, dtype=torch.bfloat16, device="cuda", generator=generator)
        for n in (heads, heads_kv, heads_kv, heads)
    )
    masks: dict[str, Any] = {"causal": True, "window": (window, 0) if window is not None else (None, None)}
    which = "forward and backward" if backward else "forward"
    which += ", deterministic" if equal_bits else ""

    def note(name: str, kind: str, median: float, rounds: list[float], **more: Any) -> None:
        rounds = sorted(rounds)
        spread = {"p20": rounds[len(rounds) // 5], "p80": rounds[-1 - len(rounds) // 5]}
        hot = {"median": median, **spread, "rounds": len(rounds)}
        file.rows.append(
            {
                "implementation": name,
                "kind": kind,
                "problem": problem,
                "milliseconds": {"hot": hot},
                "variant": which,
            }
        )
        details.append({"implementation": name, "tokens": total, "window": window, "variant": which, **more})
        if rank == 0:
            rest = "  ".join(f"{key} {value}" for key, value in more.items())
            print(
                f"{which:<37}{total:>8} {window or '-':>6} {name:<22}{median:>10.3f} ms  {rest}", flush=True
            )

    def one(*x: Tensor) -> Any:
        return flash_attention.attention(*x, deterministic=equal_bits, **masks)

    alone = passes(one, [q, k, v], dout, backward)
    single, rounds = times(alone, options.rounds)
    note("one GPU", "kernel", single, rounds)
    wanted = flash_attention.attention(q, k, v, **masks)
    for name in options.layouts:
        layout = getattr(cp.Layout, name)(total, world)
        local = [layout.shard(x, rank) for x in (q, k, v, dout)]
        for method in options.methods:
            call = _caller(layout, method, {**masks, "deterministic": equal_bits}, options.reserved_sms)
            found = call(*local[:3])
            error = (found.float() - layout.shard(wanted, rank).float()).norm() / wanted.float().norm()
            run = passes(call, local[:3], local[3], backward)
            median, rounds = times(run, options.rounds)
            schedule = cp.Schedule(method, layout, *_mask_and_heads(masks, heads, heads_kv))
            sizes = cost.Sizes(1, d, d)
            sent = [
                cost.predict(schedule, sizes, backward=b) for b in ((False, True) if backward else (False,))
            ]
            public.Transport = Silent  # type: ignore[misc]
            compute, _ = times(run, options.rounds)
            public.Transport = transport.Transport  # type: ignore[misc]
            note(
                f"{name} {method}", "kernel", median, rounds,
                efficiency=round(single / (world * median), 4), compute_ms=round(compute, 4),
                exposed_ms=round(median - compute, 4),
                megabytes_sent=round(sum(p.sent for p in sent) / 1e6, 3),
                predicted_ms=round(1e3 * sum(p.seconds for p in sent), 3), error=float(f"{float(error):.3g}"),
            )  # fmt: skip
    if window is None and not backward and options.peers:
        try:
            rounds = pytorch(cp.Layout.zigzag(total, world), rank, q, k, v, True)()
            note("PyTorch context_parallel", "peer", statistics.median(rounds), rounds)
        except Exception as error:
            if rank == 0:
                print(f"PyTorch's context_parallel is not timed: {error}")


def _caller(layout: cp.Layout, method: str, options: dict[str, Any], reserved: int) -> Callable[..., Any]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return cp.attention(q, k, v, layout=layout, method=method, reserved_sms=reserved, **options)  # type: ignore[arg-type]

    return call


def _mask_and_heads(masks: dict[str, Any], heads: int, heads_kv: int) -> tuple[Any, Any]:
    from flash_attention.call import Mask
    from flash_attention.distributed.schedule import Heads

    return Mask.of(masks["causal"], masks["window"]), Heads(heads, heads_kv)


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
    parser.add_argument("--reserved-sms", type=int, default=public.RESERVED_SMS)
    parser.add_argument("--backward", action="store_true", help="also with gradients")
    parser.add_argument("--peers", action="store_true", help="also PyTorch's context_parallel")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    file = measure(options)
    if options.json and dist.get_rank() == 0:
        file.save(options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
