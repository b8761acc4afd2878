"""Random pairs of calls that give the same query its results in two ways; ``numerics="invariant"`` promises
equal bits of both.

A scene is one sequence and what is asked of it. A view is one way to ask for some of its queries: whole, in a
chunk, decoded, beside others, packed, from a cache, from pages.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flash_attention
import flash_attention.cached
from flash_helpers.kernels.numeric_class import INVARIANT

attention: Any = flash_attention.attention
attention_varlen: Any = flash_attention.attention_varlen
attention_cached: Any = flash_attention.cached.attention_cached

PAGE_SIZES = (16, 64, 256)
Result = tuple[Tensor, Tensor]  # (queries, heads, d), (heads, queries)


@dataclass(frozen=True)
class Limits:
    """What scenes are drawn from.

    Attributes:
        head_sizes: d_head and d_head_v.
        most_keys: of a sequence.
        masks: causal, window: each pair is a mask.
        softcaps, sinks: what is drawn of.
        dtypes: element types.
        heads: (n_heads, n_heads_kv).
        scales: of q: larger ones make the references move.
    """

    head_sizes: tuple[tuple[int, int], ...] = ((64, 64), (128, 128))
    most_keys: int = 3000
    masks: tuple[tuple[bool, tuple[int | None, int | None]], ...] = (
        (True, (None, None)),
        (False, (None, None)),
        (True, (300, None)),
    )
    softcaps: tuple[float, ...] = (0.0,)
    sinks: tuple[bool, ...] = (False,)
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    heads: tuple[tuple[int, int], ...] = ((2, 1), (4, 2), (2, 2), (8, 1))
    scales: tuple[float, ...] = (1.0, 1.0, 6.0, 60.0, 300.0)


@dataclass
class Scene:
    """One sequence: q, k, v (n, heads, d), and the options of every view of it."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    window: tuple[int | None, int | None]
    softcap: float
    sinks: Tensor | None
    text: str
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of all calls."""
        options: dict[str, Any] = {"causal": self.causal, "window": self.window, "softcap": self.softcap}
        options |= {"sinks": self.sinks, "return_lse": True, "numerics": INVARIANT}
        return options | self.more

    @property
    def n(self) -> int:
        return int(self.k.shape[0])

    def keys_until(self, last: int) -> int:
        """Keys that a call needs of which query last - 1 is the last one."""
        return last if self.causal else self.n


def scene_of(rng: random.Random, device: str, limits: Limits) -> Scene:
    """A random scene."""
    d_head, d_head_v = rng.choice(limits.head_sizes)
    n_heads, n_heads_kv = rng.choice(limits.heads)
    n = rng.choice((rng.randint(1, 80), rng.randint(1, limits.most_keys), rng.randint(1, limits.most_keys)))
    causal, window = rng.choice(limits.masks)
    dtype, scale = rng.choice(limits.dtypes), rng.choice(limits.scales)
    generator = torch.Generator(device=device).manual_seed(rng.randrange(1 << 40))

    def random_rows(heads: int, d: int, factor: float = 1.0) -> Tensor:
        drawn = torch.randn(n, heads, d, generator=generator, device=device, dtype=torch.float32)
        return (drawn * factor).to(dtype)

    q, k, v = (
        random_rows(n_heads, d_head, scale),
        random_rows(n_heads_kv, d_head),
        random_rows(n_heads_kv, d_head_v),
    )
    sinks = None
    if rng.choice(limits.sinks):
        sinks = torch.randn(n_heads, generator=generator, device=device, dtype=torch.float32)
    softcap = rng.choice(limits.softcaps)
    text = f"{dtype} d {d_head}/{d_head_v} heads {n_heads}/{n_heads_kv} n {n} causal {causal} window {window}"
    return Scene(
        q,
        k,
        v,
        causal,
        window,
        softcap,
        sinks,
        f"{text} softcap {softcap} sinks {sinks is not None} x{scale}",
    )


# ---------------------------------------------------------------------- views
def whole(scene: Scene, first: int, last: int, rng: random.Random) -> Result:
    """All queries in one call."""
    out, lse = attention(scene.q[None], scene.k[None], scene.v[None], **scene.options)
    return out[0, first:last], lse[0, :, first:last]


def chunk(scene: Scene, first: int, last: int, rng: random.Random) -> Result:
    """Some queries, with the keys that they need and no more."""
    n = scene.keys_until(last)
    offset = {} if scene.causal else {"diagonal_offset": scene_offset(scene, last)}
    out, lse = attention(
        scene.q[None, first:last], scene.k[None, :n], scene.v[None, :n], **scene.options, **offset
    )
    return out[0], lse[0]


def scene_offset(scene: Scene, last: int) -> int:
    """By how many keys the places of a chunk's queries move where later keys are given, too."""
    return last - scene.n if scene.window != (None, None) else 0


def before_later_keys(scene: Scene, first: int, last: int, rng: random.Random) -> Result:
    """Some queries, with later keys, which a mask hides from them."""
    n = rng.randint(last, scene.n) if scene.causal else scene.n
    out, lse = attention(
        scene.q[None, first:last],
        scene.k[None, :n],
        scene.v[None, :n],
        diagonal_offset=last - n,
        **scene.options,
    )
    return out[0], lse[0]


def in_batch(scene: Scene, first: int, last: int, rng: random.Random) -> Result:
    """Beside other batch items."""
    batch, n = rng.randint(2, 5), scene.keys_until(last)
    place = rng.randrange(batch)
    q, k, v = (
        torch.stack([x if i == place else x.flip(0) * (i + 1) for i in range(batch)])
        for x in (scene.q[first:last], scene.k[:n], scene.v[:n])
    )
    offset = {} if scene.causal else {"diagonal_offset": scene_offset(scene, last)}
    out, lse = attention(q, k, v, **scene.options, **offset)
    return out[place], lse[place]


def one_group(scene: Scene, first: int, last: int, rng: random.Random) -> Result:
    """Each group of heads in a call of its own."""
    n, n_heads_kv = scene.keys_until(last), scene.k.shape[1]
    group = scene.q.shape[1] // n_heads_kv
    offset = {} if scene.causal else {"diagonal_offset": scene_offset(scene, last)}
    parts = []
    for head in range(n_heads_kv):
        heads = slice(head * group, (head + 1) * group)
        options = scene.options
        if scene.sinks is not None:
            options["sinks"] = scene.sinks[heads]
        own = slice(head, head + 1)
        parts.append(
            attention(
                scene.q[None, first:last, heads],
                scene.k[None, :n, own],
                scene.v[None, :n, own],
                **options,
                **offset,
            )
        )
    return torch.cat([out[0] for out, _ in parts], 1), torch.cat([lse[0] for _, lse in parts])


def _others(scene: Scene, rng: random.Random) -> list[tuple[int, int]]:
    """(queries, keys) of other sequences."""
    drawn = []
    for _ in range(rng.randint(1, 4)):
        keys = rng.randint(1, scene.n)
        drawn.append((rng.choice((1, 1, rng.randint(1, 8), rng.randint(1, keys))), keys))
    return [(min(queries, keys), keys) for queries, keys in drawn]


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def packed(scene: Scene, first: int, last: int, rng: random.Random) -> Result:
    """Packed with other sequences."""
    sequences = _others(scene, rng)
    place = rng.randint(0, len(sequences))
    n = scene.keys_until(last)
    sequences.insert(place, (last - first, n))
    qs = [scene.q[first:last] if i == place else scene.q[:a].flip(0) for i, (a, _) in enumerate(sequences)]
    ks, vs = (
        [x[:b] if i == place else x[:b] * 2 for i, (_, b) in enumerate(sequences)] for x in (scene.k, scene.v)
    )
    q_ends, k_ends = (_offsets([s[i] for s in sequences], scene.q.device) for i in (0, 1))
    longest = max(a for a, _ in sequences), max(b for _, b in sequences)
    offset = {} if scene.causal else {"diagonal_offset": scene_offset(scene, last)}
    out, lse = attention_varlen(
        torch.cat(qs), torch.cat(ks), torch.cat(vs), q_ends, k_ends, *longest, **scene.options, **offset
    )
    begin = sum(a for a, _ in sequences[:place])
    rows = slice(begin, begin + last - first)
    return out[rows], lse[:, rows]


def _cache(scene: Scene, n: int, rng: random.Random, batch: int, place: int) -> tuple[Tensor, Tensor]:
    """K and V with room behind the n keys, which holds anything finite."""
    capacity = n + rng.choice((0, 1, rng.randint(1, 700)))

    def room(x: Tensor) -> Tensor:
        cache = x.new_full((batch, capacity, *x.shape[1:]), 3.0)
        cache[place, :n] = x[:n]
        return cache

    return room(scene.k), room(scene.v)


def _paged(cache: Tensor, page_size: int, order: Tensor) -> Tensor:
    """A cache in pages; ``order``: the page of each (item, place)."""
    batch, capacity = cache.shape[:2]
    pages = -(-capacity // page_size)
    padded = cache.new_full((batch, pages * page_size, *cache.shape[2:]), -2.0)
    padded[:, :capacity] = cache
    made = cache.new_full((batch * pages + 1, page_size, *cache.shape[2:]), 5.0)
    made[order.flatten().long()] = padded.view(batch * pages, page_size, *cache.shape[2:])
    return made


def _in_pages(k: Tensor, v: Tensor, rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    page_size = rng.choice(PAGE_SIZES)
    pages = -(-k.shape[1] // page_size)
    drawn = list(range(k.shape[0] * pages + 1))
    rng.shuffle(drawn)
    table = torch.tensor(drawn[:-1], dtype=torch.int32, device=k.device).view(k.shape[0], pages)
    return _paged(k, page_size, table), _paged(v, page_size, table), table


def cached(scene: Scene, first: int, last: int, rng: random.Random) -> Result:
    """From a cache with room behind the last key, in one piece or in pages."""
    n, batch = scene.keys_until(last), rng.randint(1, 3)
    place = rng.randrange(batch)
    k, v = _cache(scene, n, rng, batch, place)
    q = torch.stack([scene.q[first:last]] * batch)
    used = torch.tensor([n if i == place else rng.randint(0, n) for i in range(batch)], dtype=torch.int32)
    pages: dict[str, Any] = {}
    if rng.random() < 0.6:
        k, v, pages["block_table"] = _in_pages(k, v, rng)
    offset = {} if scene.causal else {"diagonal_offset": scene_offset(scene, last)}
    out, lse = attention_cached(q, k, v, used.to(q.device), **pages, **scene.options, **offset)
    return out[place], lse[place]


def packed_cache(scene: Scene, first: int, last: int, rng: random.Random) -> Result:
    """Packed queries over a cache: chunks of prompts, decoding and drafts in one call."""
    sequences = [(min(a, last), b) for a, b in _others(scene, rng)]
    place, n = rng.randint(0, len(sequences)), scene.keys_until(last)
    sequences.insert(place, (last - first, n))
    batch = len(sequences)
    k, v = _cache(scene, max(b for _, b in sequences), rng, batch, place)
    q = torch.cat([scene.q[first:last] if i == place else scene.q[:a] for i, (a, _) in enumerate(sequences)])
    used = torch.tensor([b for _, b in sequences], dtype=torch.int32, device=q.device)
    more: dict[str, Any] = {"n_splits": rng.choice((None, 1, 2, 7, 64))}
    longest = max(a for a, _ in sequences), k.shape[1]
    if rng.random() < 0.6:
        k, v, more["block_table"] = _in_pages(k, v, rng)
    ends = _offsets([a for a, _ in sequences], q.device)
    offset = {} if scene.causal else {"diagonal_offset": scene_offset(scene, last)}
    out, lse = attention_varlen(
        q, k, v, ends, None, *longest, seqused_k=used, **more, **scene.options, **offset
    )
    begin = sum(a for a, _ in sequences[:place])
    rows = slice(begin, begin + last - first)
    return out[rows], lse[:, rows]


VIEWS: tuple[Callable[[Scene, int, int, random.Random], Result], ...] = (
    whole,
    chunk,
    before_later_keys,
    in_batch,
    one_group,
    packed,
    cached,
    packed_cache,
)


# ---------------------------------------------------------------------- pairs
@dataclass(frozen=True)
class Pair:
    """Two views of some queries of a scene.

    Attributes:
        text: what it is.
        differing: rows of which a bit of the output or of the LSE differs.
        rows: that were compared.
    """

    text: str
    differing: int
    rows: int


def pairs_of(seed: int, device: str, limits: Limits, per_scene: int = 4) -> Iterator[Pair]:
    """Pairs without end: of each scene and range of queries one view, and ``per_scene`` others beside it.

    Args:
        seed: which pairs.
        device: where.
        limits: what scenes are drawn from.
        per_scene: pairs of one range.
    """
    rng = random.Random(seed)
    while True:
        scene = scene_of(rng, device, limits)
        first = rng.randrange(scene.n)
        last = min(scene.n, first + rng.choice((1, 1, rng.randint(1, 16), rng.randint(1, scene.n))))
        left = rng.choice(VIEWS)
        expected = left(scene, first, last, rng)
        for right in rng.sample(VIEWS, per_scene):
            found = right(scene, first, last, rng)
            differing = differing_rows(expected, found)
            text = f"{scene.text} rows {first}:{last} {left.__name__} {right.__name__}"
            yield Pair(text, differing, last - first)


def differing_rows(a: Result, b: Result) -> int:
    """Rows of which a bit of the output or of the LSE differs."""
    if all(torch.equal(_bits(x), _bits(y)) for x, y in zip(a, b, strict=True)):
        return 0
    rows = (_bits(a[0]) != _bits(b[0])).flatten(1).any(1) | (_bits(a[1]) != _bits(b[1])).any(0)
    return int(rows.sum())


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
