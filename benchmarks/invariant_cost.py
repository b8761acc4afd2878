"""What ``numerics="invariant"`` costs, beside the default: prompts, decoding, a server's mixed batch.

    python benchmarks/invariant_cost.py --json invariant.json

Both calls of a row take turns in one process; times are medians of five.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_attention import attention, attention_varlen, last_kernel
from flash_attention.cached import attention_cached
from flash_helpers.benchmark.runner import named_device

INT = torch.int32
REPEATS, LEAST, MOST, TARGET_MS = 5, 3, 200, 20.0
TOKENS, HIDDEN = 16384, 2048
PROMPTS = ((128, (1024, 2048, 4096, 8192, 16384)), (64, (4096, 16384)))
DECODES = ((1, 4096), (1, 16384), (1, 65536), (8, 8192), (32, 8192), (64, 8192), (128, 2048))
PAGED = ((32, 8192), (1, 32768))
PAGE = 64

Row = tuple[str, Callable[..., Any]]


def _rows(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=INT, device="cuda")


def prompts() -> Iterator[Row]:
    """Whole prompts of ``TOKENS`` tokens together."""
    for d_head, lengths in PROMPTS:
        for n in lengths:
            for causal in (True, False) if d_head == 128 else (True,):
                q, k, v = (_rows(TOKENS // n, n, HIDDEN // d_head, d_head) for _ in range(3))
                name = f"prompt d {d_head} {n}" + " causal" * causal
                yield name, partial(attention, q, k, v, causal=causal)


def decoding() -> Iterator[Row]:
    """One query a sequence, 32 query heads over 8, from a cache in one piece and in pages."""
    for batch, n in DECODES:
        q, k, v = _rows(batch, 1, 32, 128), _rows(batch, n, 8, 128), _rows(batch, n, 8, 128)
        yield f"decoding {batch} x {n}", partial(attention_cached, q, k, v, _ints([n] * batch))
    for batch, n in PAGED:
        k, v, table = _pages(batch, n)
        q, used = _rows(batch, 1, 32, 128), _ints([n] * batch)
        yield f"decoding in pages {batch} x {n}", partial(attention_cached, q, k, v, used, block_table=table)
        yield f"decoding, packed queries {batch} x {n}", _packed([1] * batch, k, v, table, n)


def mixed() -> Iterator[Row]:
    """A chunk of a prompt beside sequences that decode."""
    k, v, table = _pages(64, 8192)
    yield "chunk of 2048 + 63 decoding, 8192", _packed([2048, *[1] * 63], k, v, table, 8192)


def _pages(batch: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    count = batch * n // PAGE
    table = torch.randperm(count, device="cuda").to(INT).view(batch, -1)
    return _rows(count, PAGE, 8, 128), _rows(count, PAGE, 8, 128), table


def _packed(queries: list[int], k: Tensor, v: Tensor, table: Tensor, n: int) -> Callable[..., Any]:
    ends = _ints([0, *queries]).cumsum(0, dtype=INT)
    counts: dict[str, Any] = {"seqused_k": _ints([n] * len(queries)), "block_table": table, "causal": True}
    q = _rows(sum(queries), 32, 128)
    return partial(attention_varlen, q, k, v, ends, None, max(queries), n, **counts)


def clock(call: Callable[[], Any], n: int) -> float:
    """Milliseconds of one of n calls, on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(n):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / n


def measured(name: str, call: Callable[..., Any]) -> dict[str, Any]:
    """A row of the table."""
    ways = {"default": partial(call, numerics=None), "invariant": partial(call, numerics="invariant")}
    row: dict[str, Any] = {"row": name}
    for way, once in ways.items():
        once()
        kernel = last_kernel()
        row[f"{way}_kernel"] = None if kernel is None else kernel.short_form()
    torch.cuda.synchronize()
    n = max(LEAST, min(MOST, round(TARGET_MS / max(clock(ways["default"], LEAST), 1e-3))))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(REPEATS):
        for way, once in ways.items():
            times[way].append(clock(once, n))
    medians = {way: statistics.median(found) for way, found in times.items()}
    row.update({f"{way}_us": round(1e3 * median, 2) for way, median in medians.items()})
    row["cost_percent"] = round(100 * (medians["invariant"] / medians["default"] - 1), 1)
    return row


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the rows")
    asked = parser.parse_args()
    try:
        named_device("cuda:0")
    except ValueError as missing:
        parser.error(str(missing))
    torch.manual_seed(0)
    rows = []
    for kind in (prompts, decoding, mixed):
        for name, call in kind():
            row = measured(name, call)
            times = " ".join(f"{row[f'{way}_us']:10.1f}" for way in ("default", "invariant"))
            print(f"{name:42} {times} us {row['cost_percent']:+6.1f} %", flush=True)
            rows.append(row)
            if asked.json:
                told = {"device": torch.cuda.get_device_name(), "rows": rows}
                asked.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
