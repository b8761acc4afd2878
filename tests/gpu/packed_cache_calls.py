"""Packed queries over a cache: made-up calls, and what each of their rows should be in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_attention import attention_varlen
from flash_attention.backends.cuda import device_facts_of
from flash_attention.call import Mask, Scores, problem_of
from flash_attention.devices import chooser
from flash_attention.layouts import PackedCached
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.test.reference import reference

INT = torch.int32


@dataclass
class PackedCall:
    """One call: lengths, sizes and options.

    Attributes:
        queries: of each sequence, rows of q.
        keys: of each sequence, those that count.
        page_size: rows of a page; 0: keys are a cache in one piece a sequence; -1: they are packed.
        used: of each sequence's queries, those that count; None: all.
        padding: rows of q behind the last sequence.
        capacity: keys of a sequence for which there is room; 0: those of the longest, and some.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page_size: int = 16
    used: tuple[int, ...] | None = None
    heads: tuple[int, int] = (8, 2)
    d: int = 64
    d_v: int = 0
    dtype: torch.dtype = torch.bfloat16
    padding: int = 3
    capacity: int = 0
    longest_q: int = 0
    seed: int = 0
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = torch.device("cuda")
        make = torch.Generator(device).manual_seed(self.seed)
        batch, (n_heads, n_kv), d_v = len(self.queries), self.heads, self.d_v or self.d

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=make, dtype=torch.float32).to(self.dtype)

        self.q = normal(sum(self.queries) + self.padding, n_heads, self.d)
        capacity = self.capacity or max(self.keys) + 7
        self.table: Tensor | None = None
        self.cu_seqlens_k: Tensor | None = None
        if self.page_size > 0:
            pages = -(-capacity // self.page_size)
            self.table = torch.randperm(batch * pages + 5, device=device, generator=make)[: batch * pages]
            self.table = self.table.view(batch, pages).to(INT)
            shape = (batch * pages + 5, self.page_size, n_kv)
        elif self.page_size == 0:
            shape = (batch, capacity, n_kv)
        else:
            shape = (sum(self.keys) + 2, n_kv)
            self.cu_seqlens_k = self.ends(self.keys)
        self.k, self.v = normal(*shape, self.d), normal(*shape, d_v)
        self.capacity = capacity
        self.cu_seqlens_q = self.ends(self.queries)
        self.seqused_k = torch.tensor(self.keys, dtype=INT, device=device)
        self.seqused_q = None if self.used is None else torch.tensor(self.used, dtype=INT, device=device)
        self.sink_logits = normal(n_heads).float() if self.sinks else None
        self.longest_q = self.longest_q or max(self.queries)
        self.spoil()

    def ends(self, lengths: tuple[int, ...]) -> Tensor:
        """0 and the end of each."""
        return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=INT, device="cuda")

    def rows(self, x: Tensor, sequence: int) -> Tensor:
        """The keys or values of a sequence that count, (1, n, heads, d)."""
        n = self.keys[sequence]
        if self.cu_seqlens_k is not None:
            begin = sum(self.keys[:sequence])
            return x[None, begin : begin + n]
        if self.table is None:
            return x[sequence : sequence + 1, :n]
        return x[self.table[sequence].long()].flatten(0, 1)[None, :n]

    def spoil(self) -> None:
        """NaN in every key and value that no sequence has."""
        for x in (self.k, self.v):
            kept = [self.rows(x, i).clone() for i in range(len(self.keys))]
            x.fill_(math.nan)
            for i, rows in enumerate(kept):
                n = self.keys[i]
                if self.cu_seqlens_k is not None:
                    begin = sum(self.keys[:i])
                    x[begin : begin + n] = rows[0]
                elif self.table is None:
                    x[i, :n] = rows[0]
                else:
                    places = torch.arange(n, device="cuda")
                    pages = self.table[i].long()[places // self.page_size]
                    x[pages, places % self.page_size] = rows[0]

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of ``attention_varlen``."""
        longest = max(max(self.keys), self.capacity)
        return (
            (self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k, self.longest_q, longest),
            {
                "seqused_q": self.seqused_q,
                "seqused_k": self.seqused_k,
                "block_table": self.table,
                "sinks": self.sink_logits,
                "return_lse": True,
                **self.options,
            },
        )

    def kernel(self) -> Kernel:
        """The kernel that the library chooses for it."""
        args, options = self.arguments()
        q, k, v, cu_q, cu_k, longest_q, longest_k = args
        counts = self.seqused_q, self.seqused_k, self.table
        mask = Mask.of(self.options.get("causal", False), self.options.get("window", (None, None)))
        scores = Scores(1.0, self.options.get("softcap", 0.0), self.sink_logits)
        problem = problem_of(
            q, k, v, mask, scores, PackedCached(cu_q, cu_k, *counts, longest_q, longest_k),
            lse=True, out_float32=options.get("out_dtype") is torch.float32,
        )  # fmt: skip
        return chooser("cuda").choice_for(problem, device_facts_of(), "cuda", None, explained=False).kernel

    def run(self) -> tuple[Tensor, Tensor]:
        """Output and LSE; the output in its middle of a larger buffer, whose rest must stay."""
        args, options = self.arguments()
        dtype = options.get("out_dtype") or self.dtype
        buffer = torch.full((*self.q.shape[:-1], self.v.shape[-1] + 8), 777.0, dtype=dtype, device="cuda")
        out, lse = attention_varlen(*args, **options, out=buffer[..., : self.v.shape[-1]])
        assert (buffer[..., self.v.shape[-1] :] == 777.0).all(), "something beside the output was written"
        return out, lse

    def expected(self) -> tuple[Tensor, Tensor]:
        """In float64."""
        n_heads, total = self.heads[0], self.q.shape[0]
        out = torch.zeros(total, n_heads, self.v.shape[-1], dtype=torch.float64, device="cuda")
        lse = torch.full((n_heads, total), -math.inf, dtype=torch.float64, device="cuda")
        options = {k: v for k, v in self.options.items() if k not in ("out_dtype", "n_sms", "n_splits")}
        begin = 0
        for i, n in enumerate(self.queries):
            used = n if self.used is None else min(n, self.used[i])
            rows = slice(begin, begin + used)
            begin += n
            if used:
                k, v = self.rows(self.k, i), self.rows(self.v, i)
                o, total_lse = reference(self.q[None, rows], k, v, sinks=self.sink_logits, **options)
                out[rows], lse[:, rows] = o[0], total_lse[0]
        return out, lse

    def check(self, result: tuple[Tensor, Tensor] | None = None) -> None:
        """Compares a result, or that of the call, with what is expected."""
        out, lse = self.run() if result is None else result
        wanted, wanted_lse = self.expected()
        error = (out.double() - wanted).abs() - 0.015 * wanted.abs()
        assert not out.isnan().any(), f"{out.isnan().sum()} elements are NaN"
        assert error.max() < 0.015, f"off by {error.max():.4f}, row {error.amax((1, 2)).argmax()}"
        infinite = wanted_lse.isinf()
        assert (lse.isinf() == infinite).all()
        off = (lse - wanted_lse)[~infinite].abs()
        assert not off.numel() or off.max() < 2e-3, f"LSE off by {off.max():.5f}"
