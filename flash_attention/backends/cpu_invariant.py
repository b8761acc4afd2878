"""Attention on the CPU in which the bits of a query's results depend on the query and its keys alone.

The same steps as ``cpu.attention``, with tensors that always have the same shapes: 64 rows of one head,
filled up with zeros, and whole tiles of keys, counted from key 0. A matrix product of another shape may add
up in another order. Of one shape it treats all rows alike, wherever they stand, as far as its library does:
that is tried, once for each shape. Columns of V are filled up, too: MKL adds up those behind the last whole
panel in another order, and how many these are depends on the number of threads.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from flash_attention.backends.cpu_rows import FLOAT32, Chunk
from flash_attention.backends.full_precision import full_precision
from flash_attention.backends.visibility import Visibility
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.select.errors import NoKernelError

ROWS = 64  # that one step takes
PANEL = 16  # columns of V, whatever shares them


def attention(
    config: ForwardConfig,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor | None,
    softmax_scale: float,
    *,
    left: int | None,
    right: int | None,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    """Arguments as of ``cpu.attention``.

    Raises:
        NoKernelError: matrix products of this PyTorch depend on where a row stands.
    """
    batch, seq_len_q, n_heads, d_head = q.shape
    group, d_head_v = n_heads // max(k.shape[2], 1), v.shape[3]
    columns_v = -(-d_head_v // PANEL) * PANEL
    visibility = Visibility(left, right, k.shape[1] - seq_len_q)
    threads = torch.get_num_threads()
    for length, columns in ((d_head, config.B_c), (config.B_c, columns_v)):
        if not _treats_rows_alike(length, columns, threads):
            raise NoKernelError(
                f"numerics='invariant' on the CPU: products of {ROWS} x {length} by {length} x {columns} of "
                "this PyTorch give a row other bits at another place, so that nothing can be promised; leave "
                "numerics away, or call with tensors on a GPU"
            )
    for item in range(batch):
        for head in range(n_heads):
            kv_head = slice(head // group, head // group + 1)
            keys, values = k[item : item + 1, :, kv_head], v[item : item + 1, :, kv_head]
            own_sinks = None if sinks is None else sinks[head : head + 1]
            for first in range(0, seq_len_q, ROWS):
                past = min(first + ROWS, seq_len_q)
                rows = torch.zeros(1, ROWS, 1, d_head, dtype=q.dtype, device="cpu")
                rows[0, : past - first, 0] = q[item, first:past, head]
                chunk = Chunk(config, rows, columns_v, 1, softmax_scale, softcap)
                with full_precision:
                    _attend(chunk, keys, values, visibility, first, past)
                made = torch.empty(1, ROWS, 1, columns_v, dtype=o.dtype, device="cpu")
                sums = torch.empty(1, 1, ROWS, **FLOAT32)
                chunk.finish(made, sums, own_sinks)
                o[item, first:past, head] = made[0, : past - first, 0, :d_head_v]
                if lse is not None:
                    lse[item, head, first:past] = sums[0, 0, : past - first]


def _attend(chunk: Chunk, k: Tensor, v: Tensor, visibility: Visibility, first: int, past: int) -> None:
    """Takes the tiles of which some query of [first, past) sees a key, from the last to the first."""
    n_keys, tile = k.shape[1], chunk.B_c
    begin, end = visibility.keys_of(first, past)
    begin, end = max(begin, 0), min(end, n_keys)
    for block in reversed(range(begin // tile * tile, end, tile)):
        seen = slice(max(block, begin), min(block + tile, end))  # nothing else is read: it may hold NaN
        chunk.step(
            _tile_of(k, seen, block, tile, k.shape[3]),
            _tile_of(v, seen, block, tile, chunk.o.shape[-1]),
            slice(0, ROWS),
            visibility,
            first,
            block,
            min(tile, n_keys - block),
        )


def _tile_of(x: Tensor, seen: slice, block: int, tile: int, columns: int) -> Tensor:
    """Rows of (1, keys, 1, d) in their places of a tile, (1, tile, columns) in float32; the others are 0."""
    made = torch.zeros(1, tile, columns, **FLOAT32)
    made[0, seen.start - block : seen.stop - block, : x.shape[3]] = x[0, seen, 0]
    return made


@cache
def _treats_rows_alike(length: int, columns: int, threads: int) -> bool:
    """Whether a product of ``ROWS`` rows gives each the same bits at every place.

    Args:
        length: what is added up.
        columns: of the result.
        threads: PyTorch's, by which its library may share the work.
    """
    generator = torch.Generator().manual_seed(length * columns + threads)
    a = torch.randn(1, ROWS, length, generator=generator, **FLOAT32)
    b = torch.randn(1, length, columns, generator=generator, **FLOAT32)
    with full_precision:
        product = torch.bmm(a, b)
        return all(
            torch.equal(torch.bmm(a.roll(places, 1), b), product.roll(places, 1)) for places in range(1, ROWS)
        )
