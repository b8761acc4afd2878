"""A batch of a server in one call and in separate calls: a chunk of a prompt, and sequences that decode.

    python benchmarks/mixed_batch.py --json mixed.json

Rows: a chunk of 2048 queries beside 63 sequences that decode, over caches of several lengths, in pages;
decoding alone; drafts; a chunk alone. Separate calls are ``attention_cached`` for the chunk and for the
others, one behind the other in one CUDA graph. Both graphs are replayed in turn; times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flash_attention import attention_varlen, last_kernel
from flash_attention.cached import attention_cached
from flash_helpers.benchmark.runner import named_device

INT = torch.int32


@dataclass(frozen=True)
class Batch:
    """What a server computes at once.

    Attributes:
        name: for the table.
        chunk: queries of the sequence that is in its prompt; 0: there is none.
        others: sequences that decode.
        drafts: queries of each of these.
        keys: of each sequence; of the others from a quarter of it to all of it, if ``mixed``.
        mixed: lengths differ.
    """

    name: str
    chunk: int
    others: int
    keys: int
    drafts: int = 1
    mixed: bool = False


BATCHES = (
    Batch("chunk 2048 + 63 decoding, 8k", 2048, 63, 8192),
    Batch("chunk 2048 + 63 decoding, 2k to 8k", 2048, 63, 8192, mixed=True),
    Batch("chunk 2048 + 63 decoding, 2k", 2048, 63, 2048),
    Batch("chunk 512 + 63 decoding, 8k", 512, 63, 8192),
    Batch("64 decoding, 8k", 0, 64, 8192),
    Batch("64 decoding, 2k to 8k", 0, 64, 8192, mixed=True),
    Batch("8 decoding, 16k", 0, 8, 16384),
    Batch("1 decoding, 16k", 0, 1, 16384),
    Batch("64 with 3 drafts, 8k", 0, 64, 8192, drafts=4),
    Batch("chunk 2048, 8k", 2048, 0, 8192),
)
HEADS, HEADS_KV, D = 32, 8, 128


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of a call that has been made before."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def times(graphs: dict[str, torch.cuda.CUDAGraph], repeats: int) -> dict[str, float]:
    """Median microseconds of each, replayed in turn."""
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(repeats):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken[name].append(1e3 * begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in taken.items()}


def measured(batch: Batch, page_size: int, repeats: int) -> dict[str, object]:
    """One row."""
    torch.manual_seed(0)
    n = batch.others + (batch.chunk > 0)
    queries = [batch.chunk] * (batch.chunk > 0) + [batch.drafts] * batch.others
    keys = torch.full((n,), batch.keys, dtype=INT)
    if batch.mixed:
        keys = torch.randint(batch.keys // 4, batch.keys + 1, (n,), dtype=INT)
        keys[0] = batch.keys
    keys = keys.cuda()
    pages = batch.keys // page_size
    caches = [
        torch.randn(n * pages, page_size, HEADS_KV, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    ]
    table = torch.randperm(n * pages, device="cuda").view(n, pages).to(INT)
    q = torch.randn(sum(queries), HEADS, D, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, *torch.tensor(queries).cumsum(0)], dtype=INT, device="cuda")
    chunk = batch.chunk

    def together() -> Tensor:
        return attention_varlen(
            q, *caches, ends, None, max(queries), batch.keys, seqused_k=keys, block_table=table, causal=True
        )

    first = 1 if chunk else 0
    others = q[chunk:].unflatten(0, (batch.others, batch.drafts)) if batch.others else None

    def apart() -> list[Tensor]:
        made = []
        if chunk:
            made.append(
                attention_cached(q[None, :chunk], *caches, keys[:1], block_table=table[:1], causal=True)
            )
        if others is not None:
            made.append(
                attention_cached(others, *caches, keys[first:], block_table=table[first:], causal=True)
            )
        return made

    out = together()
    one_call = last_kernel()
    expected = torch.cat([x.flatten(0, 1) for x in apart()])
    worst = (out - expected).abs().max().item()
    assert worst < 0.02, f"{batch.name}: the two ways differ by {worst}"
    taken = times({"one call": captured(together), "separate calls": captured(apart)}, repeats)
    read = 2 * 2 * HEADS_KV * D * int(keys.sum())
    return {
        "batch": batch.name,
        "page_size": page_size,
        "one_call_us": taken["one call"],
        "separate_calls_us": taken["separate calls"],
        "ratio": taken["one call"] / taken["separate calls"],
        "read_gb_s": read / taken["one call"] / 1e3,
        "kernel": one_call.short_form() if one_call else None,
        "largest_difference": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--page-size", type=int, nargs="+", default=[64, 16])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        named_device("cuda:0")
    except ValueError as missing:
        parser.error(str(missing))
    rows = []
    for page_size in options.page_size:
        for batch in BATCHES:
            row = measured(batch, page_size, options.repeats)
            rows.append(row)
            print(
                f"{row['batch']:38} pages of {page_size:3}: one call {row['one_call_us']:8.1f} us, separate "
                f"{row['separate_calls_us']:8.1f} us, ratio {row['ratio']:.3f}, {row['read_gb_s']:6.0f} GB/s",
                flush=True,
            )
            torch.cuda.empty_cache()
    if options.json:
        facts = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
