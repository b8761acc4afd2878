"""Cases of ``context_parallel.py`` and the file of their times."""

from __future__ import annotations

import argparse
import os
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import flash_attention
from flash_attention import distributed as cp
from flash_attention.distributed import cost
from flash_attention.distributed.schedule import Heads
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.result_file import ResultFile

ONE = "one GPU"
METHOD = (
    "median over rounds of the time between two CUDA events on each rank, the largest of all ranks; all "
    "ranks meet on their GPUs before each round, behind a pause in which the host launches, as it is ahead "
    "in a model; implementations one after the other in one process"
)


class Times(NamedTuple):
    """Milliseconds of a call.

    Attributes:
        median: over rounds, of the slowest rank.
        rounds: all rounds of it.
        host: how long the host of the slowest rank takes to launch it; the median.
    """

    median: float
    rounds: list[float]
    host: float


class Pass(NamedTuple):
    """What a call computes.

    Attributes:
        backward: gradients, too.
        equal_bits: they have equal bits in every run.
    """

    backward: bool
    equal_bits: bool

    @property
    def label(self) -> str:
        return ("forward and backward" if self.backward else "forward") + ", deterministic" * self.equal_bits


class Case:
    """One causal problem with its tensors, equal on all ranks."""

    def __init__(self, options: argparse.Namespace, total: int, window: int | None) -> None:
        heads, heads_kv, d = options.heads, options.heads_kv, options.d_head
        self.total, self.window = total, window
        self.heads, self.sizes = Heads(heads, heads_kv), cost.Sizes(1, d, d)
        self.masks: dict[str, Any] = {
            "causal": True,
            "window": (None, None) if window is None else (window, 0),
        }
        self.problem: dict[str, Any] = dict(
            dtype="BF16", batch=1, n_heads=heads, n_heads_kv=heads_kv, seq_len_q=total, seq_len_k=total,
            d_head=d, causal=True, **({} if window is None else {"window": window}),
        )  # fmt: skip
        generator = torch.Generator("cuda").manual_seed(0)
        self.q, self.k, self.v, self.dout = (
            torch.randn(1, total, n, d, dtype=torch.bfloat16, device="cuda", generator=generator)
            for n in (heads, heads_kv, heads_kv, heads)
        )
        self.single: dict[Pass, float] = {}  # milliseconds of one GPU

    @property
    def tensors(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.dout]

    @cached_property
    def wanted(self) -> Tensor:
        out = flash_attention.attention(self.q, self.k, self.v, **self.masks)
        assert isinstance(out, Tensor)
        return out

    def error(self, found: Tensor, layout: cp.Layout, rank: int) -> float:
        """How far the rows of a rank are from those of one GPU, beside the size of all of them."""
        far = (found.float() - layout.shard(self.wanted, rank).float()).norm() / self.wanted.float().norm()
        return float(f"{float(far):.3g}")


class Report:
    """The result file, written anew after each row."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rank, self.world = options, dist.get_rank(), dist.get_world_size()
        what = f"context-parallel attention on {self.world} GPUs"
        self.file = ResultFile("context_parallel", what, method=METHOD)
        self.file.environment = {
            **environment(torch.device("cuda", torch.cuda.current_device())), "world": self.world,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "nvls": os.environ.get("NCCL_NVLS_ENABLE", "default"),
        }  # fmt: skip
        self.details: list[dict[str, Any]] = []
        self.profiles: list[dict[str, Any]] = []
        self.file.facts = {
            "reserved_sms": options.reserved_sms, "rows": self.details, "profiles": self.profiles
        }  # fmt: skip

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)
            if self.options.json:
                self.file.save(self.options.json)

    def row(self, case: Case, which: Pass, name: str, kind: str, found: Times, **more: Any) -> None:
        rounds = sorted(found.rounds)
        hot = {
            "median": found.median, "p20": rounds[len(rounds) // 5], "p80": rounds[-1 - len(rounds) // 5],
            "rounds": len(rounds),
        }  # fmt: skip
        self.file.rows.append(
            {
                "implementation": name,
                "kind": kind,
                "problem": case.problem,
                "milliseconds": {"hot": hot},
                "variant": which.label,
            }
        )
        more = {"host_ms": round(found.host, 4), **more}
        if which in case.single and name != ONE:
            more = {"efficiency": round(case.single[which] / (self.world * found.median), 4), **more}
        place = {"tokens": case.total, "window": case.window, "variant": which.label}
        self.details.append({"implementation": name, **place, **more})
        rest = "  ".join(f"{key} {value}" for key, value in more.items())
        begin = f"{which.label:<37}{case.total:>8} {case.window or '-':>6} {name:<22}"
        self.say(f"{begin}{found.median:>10.3f} ms  {rest}")
