"""Tiny packed calls over caches and invariant calls, of both families, for NVIDIA's compute-sanitizer.

::

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitizer_serving.py

Run it once without the tool before, which compiles the kernels. Racecheck wants the flag that
``tests/gpu/sanitizer.py`` names. What kernels write is compared with float64, on the CPU. Sequences are cut
into parts and chunks, so that the kernels that join them run, too.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from torch import Tensor

from flash_attention import attention, attention_varlen, last_kernel
from flash_attention.cached import attention_cached
from flash_helpers.kernel_configs import parse_kernel_name_into_config

INT = torch.int32
QUERIES, KEYS = (130, 1, 0, 3), (300, 900, 40, 2111)
HEADS, HEADS_KV, PAGE, TOLERANCE = 4, 2, 16, 2e-2
AMPERE = (
    "(BF16, 128, 64, 64, 4): async+eager+swizzled+load_1_1_1_tiles+opt_softmax+kv_stages_3+mbarrier+"
    "skip_rescale+fragments_ahead_1"
)
AMPERE_CHUNKS = (
    "(BF16, 128, 64, 32, 4): async+eager+swizzled+load_1_1_1_tiles+opt_softmax+kv_stages_4+mbarrier+"
    "skip_rescale+fragments_ahead_1+chunk_40"
)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        d_head: elements of a head.
        keys: "pages", "packed" or "cache", one piece a sequence.
        decoding: one query a sequence, as a dense tensor over the cache.
        options: of the call.
    """

    d_head: int
    keys: str
    decoding: bool
    options: dict[str, Any]

    def __str__(self) -> str:
        what = "decoding" if self.decoding else "packed queries"
        options = ", ".join(self.options) or "default"
        return f"{what} over keys in {self.keys}, head size {self.d_head}, {options}"


INVARIANT = {"numerics": "invariant"}
CASES = (
    *(Case(d_head, keys, False, {}) for d_head, keys in ((128, "pages"), (64, "pages"), (256, "cache"))),
    *(Case(d_head, "pages", False, INVARIANT) for d_head in (128, 64)),
    Case(128, "cache", False, INVARIANT),
    Case(128, "packed", False, {}),
    *(Case(d_head, "pages", True, INVARIANT) for d_head in (128, 64)),
    Case(128, "cache", True, {}),
    Case(128, "pages", False, {"config": parse_kernel_name_into_config(AMPERE)}),
    Case(128, "pages", False, {"config": parse_kernel_name_into_config(AMPERE_CHUNKS)}),
    Case(128, "cache", True, {"config": parse_kernel_name_into_config(AMPERE_CHUNKS)}),
)


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float64, of one sequence, (length, heads, d_head); the last query sees all keys."""
    rows, heads = q.shape[:2]
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(q.shape[-1])
    hidden = torch.arange(len(k)) > torch.arange(rows)[:, None] + len(k) - rows
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0)
    return torch.einsum("hqk,khd->qhd", weights, v)


def in_pages(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pages, in no order, and the table that finds them, (batch, pages of the longest)."""
    counts = [-(-len(x) // PAGE) for x in rows]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(4)).to(INT)
    pages = torch.full((sum(counts), PAGE, *rows[0].shape[1:]), float("nan"), dtype=rows[0].dtype)
    table = torch.zeros(len(rows), max(counts), dtype=INT)
    for b, (x, own) in enumerate(zip(rows, order.split(counts), strict=True)):
        table[b, : len(own)] = own
        for place, page in enumerate(own):
            part = x[place * PAGE : (place + 1) * PAGE]
            pages[page, : len(part)] = part
    return pages, table


def run(case: Case) -> float:
    """The largest error of a call."""
    make = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make).bfloat16()

    queries = (1,) * len(KEYS) if case.decoding else QUERIES
    q = [normal(n, HEADS, case.d_head) for n in queries]
    k, v = ([normal(n, HEADS_KV, case.d_head) for n in KEYS] for _ in range(2))
    wanted = torch.cat([expected(*x) for x in zip(q, k, v, strict=True)])
    given: dict[str, Any] = {"causal": True, **case.options}
    counts = torch.tensor(KEYS, dtype=INT).cuda()
    if case.keys == "pages":
        (k_given, table), (v_given, _) = in_pages(k), in_pages(v)
        given["block_table"] = table.cuda()
    elif case.keys == "packed":
        k_given, v_given = torch.cat(k), torch.cat(v)
    else:
        k_given, v_given = (torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (k, v))
    rows, k_given, v_given = torch.cat(q).cuda(), k_given.cuda(), v_given.cuda()
    if case.decoding:
        out = attention_cached(rows[:, None], k_given, v_given, counts, **given)[:, 0]
    else:
        ends = torch.tensor([0, *queries]).cumsum(0).to(INT).cuda()
        k_ends = torch.tensor([0, *KEYS]).cumsum(0).to(INT).cuda() if case.keys == "packed" else None
        out = attention_varlen(
            rows, k_given, v_given, ends, k_ends, max(queries), max(KEYS), seqused_k=counts, **given
        )
    return float((out.cpu().double() - wanted).abs().max())


def run_prompt(**options: Any) -> float:
    """The largest error of a prompt whose blocks each take several chunks."""
    make = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(KEYS[-1], heads, 128, generator=make).bfloat16() for heads in (HEADS, HEADS_KV, HEADS_KV)
    )
    out = attention(*(x[None].cuda() for x in (q, k, v)), causal=True, **options)[0]
    return float((out.cpu().double() - expected(q, k, v)).abs().max())


def main() -> int:
    """Runs all cases; the number of wrong ones."""
    wrong = 0
    for options in (INVARIANT, {"config": parse_kernel_name_into_config(AMPERE_CHUNKS)}):
        error = run_prompt(**options)
        wrong += not error < TOLERANCE
        kernel = last_kernel()
        print(f"prompt, {', '.join(options)}: {error:.1e}, {kernel and kernel.short_form()}", flush=True)
    for case in CASES:
        error = run(case)
        wrong += not error < TOLERANCE
        kernel = last_kernel()
        print(f"{case}: {error:.1e}, {kernel and kernel.short_form()}", flush=True)
    print(f"{len(CASES) + 2} cases, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
