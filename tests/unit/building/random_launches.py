"""Calls of all kinds and shapes that launch something: of one query, odd lengths, many heads, many sequences,
64k keys. Their tensors are not filled, so that large ones cost nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_attention import attention, attention_varlen
from flash_attention.cached import attention_cached

HEAD_SIZES = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
HEADS = ((1, 1), (5, 5), (32, 8), (64, 1))
LENGTHS = (1, 2, 63, 77, 128, 129, 1000, 1024, 1025, 4097)
LONG = 65536
LAYOUTS = ("batch", "packed", "cached", "pages", "packed cache", "packed pages")
Named = tuple[str, Callable[[], Any]]


def calls(limit_of_sms: bool, number: int = 420) -> Iterator[Named]:
    """So many calls, always the same, each with its description.

    Args:
        limit_of_sms: also with a limit of multiprocessors.
        number: how many.
    """
    rng = random.Random(19)
    for i in range(number):
        yield _call(
            rng, LAYOUTS[i % len(LAYOUTS)], "invariant" if i // len(LAYOUTS) % 2 else None, limit_of_sms
        )


def _call(rng: random.Random, layout: str, numerics: str | None, limit_of_sms: bool) -> Named:
    sizes, heads = rng.choice(HEAD_SIZES), rng.choice(HEADS)
    batch = rng.choice((1, 2, 7, 300))
    most = rng.choice((*LENGTHS, LONG)) if batch < 300 else rng.choice((1, 77, 1025))
    keys = [most, *(rng.choice((0, 1, rng.randint(1, most))) for _ in range(batch - 1))]
    few = rng.random() < 0.5
    queries = [
        min(n, rng.choice((1, rng.randint(1, 8)))) if few else min(n, rng.choice((1, 300, most)))
        for n in keys
    ]
    options: dict[str, Any] = {"numerics": numerics, "return_lse": rng.random() < 0.5}
    options |= rng.choice(({}, {}, {"causal": True}, {"causal": True}, {"window": (rng.randint(0, most), 0)}))
    if rng.random() < 0.15:
        options["softcap"] = 30.0
    if rng.random() < 0.15:
        options["sinks"] = torch.empty(heads[0])
    if limit_of_sms and rng.random() < 0.15:
        options["n_sms"] = rng.choice((1, 7, 131))
    text = f"{layout} {numerics} batch {batch}, {max(queries)} queries, {most} keys, heads {heads}, {sizes}"
    made = _LAYOUTS[layout](rng, sizes, heads, queries, keys)
    return f"{text} {sorted(options)}", partial(made, **options)


def _rows(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _key_rows(sizes: tuple[int, int], *shape: int) -> tuple[Tensor, Tensor]:
    return _rows(*shape, sizes[0]), _rows(*shape, sizes[1])


def _batch(_: Any, sizes: Any, heads: Any, queries: list[int], keys: list[int]) -> Callable[..., Any]:
    q = _rows(len(keys), max(queries), heads[0], sizes[0])
    return partial(attention, q, *_key_rows(sizes, len(keys), max(keys), heads[1]))


def _packed(_: Any, sizes: Any, heads: Any, queries: list[int], keys: list[int]) -> Callable[..., Any]:
    q, kv = _rows(sum(queries), heads[0], sizes[0]), _key_rows(sizes, sum(keys), heads[1])
    return partial(attention_varlen, q, *kv, _ends(queries), _ends(keys), max(queries), max(keys))


def _cache(
    rng: random.Random, sizes: Any, heads: Any, keys: list[int], pages: bool
) -> tuple[Any, dict[str, Any]]:
    room = max(keys) + rng.choice((0, 1, 700))
    if not pages:
        return _key_rows(sizes, len(keys), room, heads[1]), {}
    size = rng.choice((16, 64, 256))
    most = -(-room // size)
    table = torch.arange(len(keys) * most, dtype=torch.int32).view(len(keys), most)
    return _key_rows(sizes, table.numel(), size, heads[1]), {"block_table": table}


def _cached(
    pages: bool, rng: random.Random, sizes: Any, heads: Any, queries: Any, keys: Any
) -> Callable[..., Any]:
    (k, v), table = _cache(rng, sizes, heads, keys, pages)
    q = _rows(len(keys), max(queries), heads[0], sizes[0])
    return partial(attention_cached, q, k, v, torch.tensor(keys, dtype=torch.int32), **table)


def _packed_cache(
    pages: bool, rng: random.Random, sizes: Any, heads: Any, queries: Any, keys: Any
) -> Callable[..., Any]:
    kv, table = _cache(rng, sizes, heads, keys, pages)
    q = _rows(sum(queries), heads[0], sizes[0])
    used = {"seqused_k": torch.tensor(keys, dtype=torch.int32), "n_splits": rng.choice((None, None, 1, 3))}
    return partial(attention_varlen, q, *kv, _ends(queries), None, max(queries), max(keys), **used, **table)


_LAYOUTS: dict[str, Callable[..., Callable[..., Any]]] = {
    "batch": _batch,
    "packed": _packed,
    "cached": partial(_cached, False),
    "pages": partial(_cached, True),
    "packed cache": partial(_packed_cache, False),
    "packed pages": partial(_packed_cache, True),
}
