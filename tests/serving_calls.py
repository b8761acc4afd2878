"""Calls by flash-attn 3's and vLLM's names whose numbers change in place, and what they should give.

One call has buffers that stay where they are. ``draw`` writes other lengths, tables and values into them, as
a server does between two replays of a CUDA graph.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

from flash_attention.integrations import flash_attn_3, vllm
from flash_helpers.test.reference import reference

HEADS, HEADS_KV, SEQUENCES, ITEMS = 8, 2, 5, 7
ROWS, LONGEST, NEW = 64, 32, 40  # of q in all and of one sequence, and rows that are appended


class ServingCall:
    """One way of asking.

    Args:
        device: where.
        name: ``flash_attn_3`` or ``vllm``.
        page_size: rows of a page; 0: a cache in one piece an item.
        capacity: keys of an item for which there is room.
        d: head size.
        batched: one query and one new key a sequence, as a batch; else packed rows.
        leftpad: keys begin behind padding.
        rotary: queries and new keys are turned.
        in_order: the first items are read, without ``cache_batch_idx``.
        options: further arguments.
    """

    def __init__(
        self,
        device: str,
        name: str = "flash_attn_3",
        *,
        page_size: int = 16,
        capacity: int = 1200,
        d: int = 64,
        batched: bool = False,
        leftpad: bool = False,
        rotary: bool = False,
        in_order: bool = False,
        **options: Any,
    ) -> None:
        self.name, self.page_size, self.d, self.batched, self.options = name, page_size, d, batched, options
        self.pages = -(-capacity // page_size) if page_size else 1
        self.capacity = self.pages * page_size if page_size else capacity
        self.appends = name == "flash_attn_3"
        lead = (SEQUENCES, 1) if batched else (ROWS,)
        lead_new = (SEQUENCES, 1) if batched else (NEW,)
        rows = (ITEMS * self.pages + 3, page_size) if page_size else (ITEMS, self.capacity)

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def ints(*shape: int) -> Tensor:
            return empty(*shape, dtype=torch.int32)

        self.q, self.out = empty(*lead, HEADS, d), empty(*lead, HEADS, d)
        self.k, self.v = empty(*lead_new, HEADS_KV, d), empty(*lead_new, HEADS_KV, d)
        self.caches = [empty(*rows, HEADS_KV, d) for _ in range(2)]
        self.table = ints(ITEMS if self.appends else SEQUENCES, self.pages) if page_size else None
        self.items, self.counts, self.pad = ints(SEQUENCES), ints(SEQUENCES), ints(SEQUENCES)
        self.ends_q, self.ends_new = ints(SEQUENCES + 1), ints(SEQUENCES + 1)
        self.has_pad, self.in_order = leftpad, in_order
        angles = torch.arange(self.capacity + LONGEST)[:, None] * 10.0 ** -torch.arange(d // 4)
        self.rotary = [x.to(device) for x in (angles.cos(), angles.sin())] if rotary else None
        self.sinks = torch.linspace(-1, 1, HEADS, device=device)

    # ------------------------------------------------------------------ numbers
    def draw(self, seed: int) -> None:
        """Other lengths, tables, keys and queries in the same buffers."""
        make = random.Random(seed)
        self.queries, self.new = [1] * SEQUENCES, [1] * SEQUENCES
        if not self.batched:
            self.queries = self._lengths(make, ROWS, LONGEST)
            self.new = self._lengths(make, NEW, LONGEST)
        if not self.appends:
            self.new = [0] * SEQUENCES
        self.before = [
            make.choice((0, 1, 17, make.randint(0, self.capacity - n), self.capacity - n)) for n in self.new
        ]
        self.padding = [make.choice((0, n // 3, n)) if self.has_pad else 0 for n in self.before]
        self.item = list(range(SEQUENCES))
        if self.appends and not self.in_order:
            self.item = make.sample(range(ITEMS), SEQUENCES)
        if self.table is not None:
            order = make.sample(range(len(self.caches[0])), self.table.numel())
            self.table.copy_(torch.tensor(order).view(self.table.shape))
        for buffer, numbers in (
            (self.items, self.item), (self.counts, self.before), (self.pad, self.padding),
            (self.ends_q, self._ends(self.queries)), (self.ends_new, self._ends(self.new)),
        ):  # fmt: skip
            buffer.copy_(torch.tensor(numbers))
        generator = torch.Generator().manual_seed(seed)
        for x in (self.q, self.k, self.v, *self.caches):
            x.copy_(torch.randn(x.shape, generator=generator))
        self.held = [x.clone() for x in self.caches]

    @staticmethod
    def _lengths(make: random.Random, rows: int, longest: int) -> list[int]:
        lengths = []
        for _ in range(SEQUENCES):
            lengths.append(min(rows - sum(lengths), make.choice((0, 1, 1, 3, 9, longest))))
        return lengths

    @staticmethod
    def _ends(lengths: list[int]) -> list[int]:
        return [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    # ------------------------------------------------------------------ the call
    def call(self) -> tuple[Tensor, Tensor]:
        """Output and LSE."""
        if self.name == "vllm":
            out, lse = vllm.flash_attn_varlen_func(
                self.q, *self.caches, max_seqlen_q=LONGEST, cu_seqlens_q=self.ends_q, seqused_k=self.counts,
                max_seqlen_k=self.capacity, block_table=self.table, causal=True, s_aux=self.sinks,
                out=self.out, return_softmax_lse=True, **self.options,
            )  # fmt: skip
            assert out is self.out
            return out, lse
        packed = {"cu_seqlens_q": self.ends_q, "cu_seqlens_k_new": self.ends_new, "max_seqlen_q": LONGEST}
        cos, sin = self.rotary or (None, None)
        return flash_attn_3.flash_attn_with_kvcache(
            self.q, *self.caches, self.k, self.v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=self.counts,
            cache_batch_idx=None if self.in_order else self.items, page_table=self.table, causal=True,
            return_softmax_lse=True, cache_leftpad=self.pad if self.has_pad else None,
            **({} if self.batched else packed), **self.options,
        )  # fmt: skip

    # ------------------------------------------------------------------ what is expected
    def _held(self, x: Tensor, sequence: int) -> Tensor:
        """All rows of the item that a sequence reads."""
        item = self.item[sequence]
        return x[item] if self.table is None else x[self.table[item].long()].flatten(0, 1)

    def _rows(self, x: Tensor, lengths: list[int], sequence: int) -> Tensor:
        if self.batched:
            return x[sequence]
        begin = sum(lengths[:sequence])
        return x[begin : begin + lengths[sequence]]

    def _turned(self, x: Tensor, begin: int) -> Tensor:
        """Rows from a position on, turned in pairs of neighbouring columns."""
        if self.rotary is None:
            return x
        cos, sin = (table[begin : begin + len(x), None].float() for table in self.rotary)
        n = 2 * cos.shape[-1]
        a, b = x[..., 0:n:2].float(), x[..., 1:n:2].float()
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        return torch.cat((turned.to(x.dtype), x[..., n:]), -1)

    def check(self, out: Tensor, lse: Tensor) -> None:
        """Compares a result with float64, and the caches with what they held and what was appended."""
        written = 0
        for i in range(SEQUENCES):
            before, n = self.before[i], self.new[i]
            keys = []
            for held, now, new in zip(self.held, self.caches, (self.k, self.v), strict=True):
                rows = self._rows(new, self.new, i)[:n]
                if new is self.k:
                    rows = self._turned(rows, before)
                there = self._held(now, i)
                torch.testing.assert_close(there[before : before + n], rows, atol=1e-2, rtol=1e-2)
                assert torch.equal(there[:before], self._held(held, i)[:before])
                keys.append(there[None, self.padding[i] : before + n])
            written += n
            queries = self._turned(self._rows(self.q, self.queries, i), before)
            if not len(queries):
                continue
            options = {"causal": True, "sinks": self.sinks if self.name == "vllm" else None}
            if "window_size" in self.options:
                options["window"] = tuple(self.options["window_size"])
            if "softcap" in self.options:
                options["softcap"] = self.options["softcap"]
            wanted, wanted_lse = reference(queries[None], *keys, **options)
            got = self._rows(out, self.queries, i)
            got_lse = lse[i] if self.batched else self._rows(lse.T, self.queries, i).T
            torch.testing.assert_close(got.double(), wanted[0], atol=2e-2, rtol=2e-2)
            finite = ~wanted_lse[0].isinf()
            assert torch.equal(got_lse.isinf(), ~finite)
            torch.testing.assert_close(got_lse[finite].double(), wanted_lse[0][finite], atol=3e-3, rtol=1e-3)
        for held, now in zip(self.held, self.caches, strict=True):
            assert int((held != now).flatten(-2).any(-1).sum()) <= written
        if not self.batched and (last := sum(self.queries)) < ROWS:
            assert (out[last:] == 0).all()
            assert (lse[:, last:] == -math.inf).all()


CALLS: dict[str, dict[str, Any]] = {
    "flash-attn 3, pages": {"page_size": 16},
    "flash-attn 3, pages of 5": {"page_size": 5},
    "flash-attn 3, one piece": {"page_size": 0},
    "flash-attn 3, one piece in order": {"page_size": 0, "capacity": 1210, "in_order": True},
    "flash-attn 3, decoding in order": {"page_size": 0, "capacity": 1210, "batched": True, "in_order": True},
    "flash-attn 3, padding on the left": {"page_size": 16, "leftpad": True, "capacity": 400},
    "flash-attn 3, turned": {"page_size": 16, "rotary": True},
    "flash-attn 3, two parts": {"page_size": 16, "num_splits": 2},
    "flash-attn 3, decoding": {"page_size": 16, "batched": True},
    "flash-attn 3, decoding from one piece": {"page_size": 0, "batched": True},
    "vLLM, pages": {"name": "vllm", "page_size": 16},
    "vLLM, window": {"name": "vllm", "page_size": 32, "window_size": [100, 0], "softcap": 20.0},
    "vLLM, odd head size": {"name": "vllm", "page_size": 16, "d": 60},
}
