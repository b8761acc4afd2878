"""Calls on tensors at the edges of mapped memory, each compared with the float64 reference.

``python tests/gpu/unmapped_cases.py end`` or ``begin``: a process of its own, since an illegal access ends
all work on the GPU. It prints each case before it runs. With ``none`` the tensors are PyTorch's, and with a
number behind it that case runs alone: so kernels are compiled, several cases at a time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from unmapped import at_an_edge

from flash_attention import attention, attention_varlen, last_kernel
from flash_attention.cached import attention_cached
from flash_attention.compat.flash_attn import flash_attn_with_kvcache
from flash_helpers.kernel_configs import DType, ForwardTraits, choose_ampere_kernel, choose_hopper_kernel
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.test.reference import reference

HEADS, HEADS_KV, PAGE = 4, 2, 16
TOLERANCE = {"atol": 1.6e-2, "rtol": 1.6e-2}  # bf16


@dataclass(frozen=True)
class Case:
    """Queries and keys of each sequence; ``layout``: batch, packed, cached or paged.

    Attributes:
        padding: packed: rows of q and of k behind the last sequence.
        ends_q, ends_k: packed: offsets in place of the right ones; it only counts that all rows are written.
        counts: cached, paged: what the device has as numbers of keys, in place of ``k``.
    """

    layout: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    d: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    padding: int = 0
    ends_q: tuple[int, ...] | None = None
    ends_k: tuple[int, ...] | None = None
    counts: tuple[int, ...] | None = None


LOWEST, HIGHEST = -(2**31), 2**31 - 1


CASES = (
    Case("batch", (65, 65), (200, 200)),
    Case("batch", (65, 65), (200, 200), options={"causal": True}),
    Case("batch", (300, 300), (77, 77), d=128, options={"window": (40, 7)}),
    Case("batch", (300, 300), (301, 301), d=40),
    Case("batch", (1, 1), (3000, 3000), d=128),
    Case("packed", (70, 1, 33), (130, 65, 40)),
    Case("packed", (3, 300), (300, 3), d=128, options={"causal": True}),
    Case("packed", (5, 7), (5, 7), d=40),
    Case("packed", (1, 1, 1), (21, 1, 140), d=128),
    Case("packed", (70, 1, 33), (130, 65, 40), d=128, padding=50),
    Case("packed", (1, 1), (1000, 70), d=128, padding=3),  # keys in parts
    Case("packed", (5, 7), (5, 7), d=40, padding=300, options={"causal": True}),
    Case("packed", (128, 128), (128, 128), ends_q=(0, -5, 256)),
    Case("packed", (128, 128), (128, 128), d=128, ends_q=(LOWEST, HIGHEST, 5), options={"causal": True}),
    Case("packed", (128, 128), (128, 128), ends_q=(0, 90, 300), ends_k=(-9, 300, 0)),
    Case("packed", (128, 128), (128, 128), d=128, ends_k=(LOWEST, HIGHEST, LOWEST)),
    Case("packed", (1, 1), (3000, 70), d=128, ends_k=(-1, 3000, HIGHEST)),
    Case("packed", (128, 128), (128, 128), ends_k=(256, HIGHEST, HIGHEST), options={"window": (20, 0)}),
    Case("cached", (3, 3), (0, 32), d=128, counts=(-5, HIGHEST)),
    Case("cached", (70, 70), (300, 32), counts=(300, 32), options={"window": (40, 0)}),
    Case("paged", (3, 3), (0, 32), d=128, counts=(LOWEST, HIGHEST)),
    Case("paged", (3, 3), (300, 200), d=128, options={"window": (33, 0)}),
    Case("cached", (3, 3), (3, 20), d=32, options={"causal": True}),
    Case("cached", (1, 1), (3000, 1), d=128),
    Case("paged", (3, 3), (3, 3), d=32, options={"causal": True}),
    Case("paged", (3, 3), (3, 20), d=128),
    Case("paged", (1, 1), (3000, 17), d=64),
)


def configs(case: Case) -> Iterator[ForwardConfig | None]:
    """The library's choice (None), and where the call takes one, the choice of each family."""
    yield None
    if case.layout in ("batch", "packed"):
        # The largest has columns of which the tensors have none, 64 of a copy and more.
        d_head = 256 if case.d == 40 else case.d
        capability = torch.cuda.get_device_capability()
        causal = case.options.get("causal", False)
        if capability == (9, 0):
            traits = ForwardTraits(causal=causal, varlen=case.layout == "packed")
            yield choose_hopper_kernel(DType.BF16, d_head, causal, 512, traits=traits)[0].config
        yield choose_ampere_kernel(DType.BF16, d_head, causal, 512, capability, lse=True)[0].config


def run(case: Case, config: ForwardConfig | None, edge: str) -> None:
    """One call on tensors at ``edge``, compared sequence by sequence."""
    generator = torch.Generator().manual_seed(0)
    sequences = []  # (q, k, v) of each, (1, rows, heads, d)
    for n_q, n_k in zip(case.q, case.k, strict=True):
        rows = ((n_q, HEADS), (n_k, HEADS_KV), (n_k, HEADS_KV))
        sequences.append([torch.randn(1, *shape, case.d, generator=generator).bfloat16() for shape in rows])
    q, k, v = ([s[i] for s in sequences] for i in range(3))

    def placed(x: Tensor) -> Tensor:
        return x.cuda() if edge == "none" else at_an_edge(x.cuda(), edge)

    if case.layout == "batch":
        q_in, k_in, v_in = (placed(torch.cat(x)) for x in (q, k, v))
        out = placed(torch.zeros_like(q_in))
        attention(q_in, k_in, v_in, out=out, config=config, **case.options)
        outputs = list(out.split(1))
    elif case.layout == "packed":
        q_in, k_in, v_in = (placed(_with_padding(torch.cat(x, 1)[0], case.padding)) for x in (q, k, v))
        out = placed(torch.full_like(q_in, torch.nan))
        lengths_and_ends = ((case.q, case.ends_q), (case.k, case.ends_k))
        ends = [
            placed(torch.tensor(given or [0, *itertools.accumulate(n)], dtype=torch.int32))
            for n, given in lengths_and_ends
        ]
        longest = [sum(n) if given else max(n) for n, given in lengths_and_ends]
        attention_varlen(q_in, k_in, v_in, *ends, *longest, out=out, config=config, **case.options)
        assert out.isfinite().all()
        if case.ends_q or case.ends_k:
            return
        *outputs, padding = (x[None] for x in out.split([*case.q, case.padding]))
        assert not padding.any()
    else:
        outputs = _with_a_cache(case, q, k, v, placed)
    torch.cuda.synchronize()
    causal, window = case.options.get("causal", False), case.options.get("window", (None, None))
    for mine, tensors in zip(outputs, sequences, strict=True):
        expected, _ = reference(*tensors, causal=causal, window=window)
        torch.testing.assert_close(mine.cpu().double(), expected, **TOLERANCE)


def _with_padding(x: Tensor, n_rows: int) -> Tensor:
    """Rows of NaN behind those of x."""
    return torch.cat([x, x.new_full((n_rows, *x.shape[1:]), torch.nan)])


def _with_a_cache(case: Case, q: list[Tensor], k: list[Tensor], v: list[Tensor], placed: Any) -> list[Tensor]:
    """Keys in a cache, in its last pages where it has pages; NaN behind them, and before all windows."""
    batch, capacity = len(case.q), -(-max(case.k) // PAGE) * PAGE
    caches = []
    for rows in (k, v):
        cache = torch.full((batch, capacity, HEADS_KV, case.d), torch.nan, dtype=torch.bfloat16)
        for b, of_one in enumerate(rows):
            cache[b, : of_one.shape[1]] = of_one[0]
            if "window" in case.options:
                cache[b, : max(0, of_one.shape[1] - case.q[b] - case.options["window"][0])] = torch.nan
        caches.append(cache)
    table = None
    if case.layout == "paged":  # in reverse order
        caches = [cache.view(-1, PAGE, HEADS_KV, case.d).flip(0) for cache in caches]
        table = placed(torch.arange(caches[0].shape[0] - 1, -1, -1, dtype=torch.int32).view(batch, -1))
    lengths = placed(torch.tensor(case.counts or case.k, dtype=torch.int32))
    k_cache, v_cache = (placed(cache) for cache in caches)
    queries = placed(torch.cat(q))
    if case.counts or "window" in case.options:
        out = attention_cached(queries, k_cache, v_cache, lengths, block_table=table, **case.options)
    else:
        out = flash_attn_with_kvcache(
            queries, k_cache, v_cache, cache_seqlens=lengths, block_table=table, **case.options
        )
    return list(out.split(1))


def main() -> None:
    """Runs every case, or one."""
    edge, *chosen = sys.argv[1:]
    for case in [CASES[int(i)] for i in chosen] or CASES:
        for config in configs(case):
            print(f"{case}, config={config.short_form() if config else None}", flush=True)
            run(case, config, edge)
            print(f"    right: {last_kernel().short_form()}", flush=True)


if __name__ == "__main__":
    main()
