"""The masks and score functions that the field uses, each as a user would write it: name to (kind, function).

Those of attention-gym are here by what they compute, for sequences of SEQ tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flash_attention.mods import and_masks, or_masks

BATCH, HEADS, SEQ = 2, 4, 64
_rng = torch.Generator().manual_seed(11)


def whole(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_rng)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_rng, dtype=torch.float32)


def causal(b, h, q, k):
    return q >= k


def window(left):
    return and_masks(causal, lambda b, h, q, k: q - k <= left)


def prefix(length):
    return or_masks(lambda b, h, q, k: k < length, causal)


def dilated(left, step):
    def mask(b, h, q, k):
        distance = torch.abs(q - k)
        return (distance <= left) & (distance % step == 0)

    return mask


def global_tokens(left, chosen):
    return lambda b, h, q, k: (torch.abs(q - k) <= left) | chosen[q] | chosen[k]


def batches_of(mask, tokens):
    """One packed sequence of several batch items."""

    def packed(b, h, q, k):
        return (q // tokens == k // tokens) & mask(q // tokens, h, q % tokens, k % tokens)

    return packed


def documents(mask, ends):
    document = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())

    def inner(b, h, q, k):
        same = document[q] == document[k]
        return same & mask(b, h, q - ends[document[q]], k - ends[document[k]])

    return inner


def packed_causal(ends):
    document = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
    return lambda b, h, q, k: (q >= k) & (k >= ends[document[q]])


def shared_prefix(ends, prefixes):
    document = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())

    def mask(b, h, q, k):
        own, other = document[q], document[k]
        of_prefix = prefixes[own]
        in_prefix = (k >= ends[of_prefix]) & (k < ends[of_prefix + 1]) & (of_prefix != own)
        return (own == other) & (q >= k) | in_prefix

    return mask


def flamingo(intervals, image_tokens):
    image = torch.arange(SEQ) // image_tokens

    def mask(b, h, q, k):
        begin, end = intervals[image[k]]
        return (q >= begin) & (q < end)

    return mask


def block_diffusion(length, block):
    """Noisy tokens, then clean ones."""

    def mask(b, h, q, k):
        clean_q, clean_k = q >= length, k >= length
        block_q, block_k = q % length // block, k % length // block
        own = (block_q == block_k) & (clean_q == clean_k)
        offset = (block_q > block_k) & clean_k & ~clean_q
        return own | offset | ((block_q >= block_k) & clean_q & clean_k)

    return mask


def tree(prefix_len, ancestors):
    n = ancestors.shape[0]

    def mask(b, h, q, k):
        node = (k - prefix_len).clamp(min=0, max=n - 1)
        return (k < prefix_len) | (
            (k >= prefix_len) & (k < prefix_len + n) & ancestors[q.clamp(max=n - 1), node]
        )

    return mask


def tree_training(prefix_len, block):
    def mask(b, h, q, k):
        at = k - prefix_len
        own = (at >= 0) & (q // block == at // block) & (at % block <= q % block)
        return (k < prefix_len) | own

    return mask


def neighbourhood(width, height, kernel, place=lambda i, width: (i % width, i // width)):
    def mask(b, h, q, k):
        (qx, qy), (kx, ky) = place(q, width), place(k, width)
        half = kernel // 2
        cx, cy = qx.clamp(half, width - 1 - half), qy.clamp(half, height - 1 - half)
        return (torch.abs(cx - kx) <= half) & (torch.abs(cy - ky) <= half)

    return mask


def in_tiles(i, width, tile=4):
    """Tokens lie tile by tile."""
    number, inside = i // (tile * tile), i % (tile * tile)
    per_row = width // tile
    return number % per_row * tile + inside % tile, number // per_row * tile + inside // tile


def in_morton_order(i, width):
    x, y = 0, 0
    for bit in range(width.bit_length() - 1):
        x = x | ((i >> (2 * bit)) & 1) << bit
        y = y | ((i >> (2 * bit + 1)) & 1) << bit
    return x, y


def sliding_tiles(shape, tile, radius):
    """Of a canvas of two or three dimensions whose tokens lie tile by tile."""
    tiles = [n // t for n, t in zip(shape, tile, strict=True)]

    def places(i):
        number = i // math.prod(tile)
        found = []
        for n in reversed(tiles):
            found.append(number % n)
            number = number // n
        return found[::-1]

    def mask(b, h, q, k):
        seen = None
        for of_q, of_k, n in zip(places(q), places(k), tiles, strict=True):
            centre = of_q
            if n > 2 * radius:
                centre = of_q.clamp(radius, n - 1 - radius)
            near = torch.abs(centre - of_k) <= radius
            seen = near if seen is None else seen & near
        return seen

    return mask


def spatial_head(tokens, frames, text):
    width = math.floor(tokens * 1.5)

    def mask(b, h, q, k):
        if text == 0:
            return torch.abs(q - k) < width
        return (torch.abs(q - k) < width) | (k >= frames * tokens) | (q >= frames * tokens)

    return mask


def temporal_head(tokens, frames, text):
    def mask(b, h, q, k):
        distance = torch.abs(q % tokens - k % tokens)
        near = distance < tokens // 4
        return near | (q >= frames * tokens) | (k >= frames * tokens) if text else near

    return mask


def chosen_tiles(topk, tile, sizes):
    def mask(b, h, q, k):
        of_k = k // tile
        chosen = (topk[b, h, q // tile] == of_k.unsqueeze(-1)).any(dim=-1)
        return chosen & (k % tile < sizes[of_k])

    return mask


def tile_map(chosen, tile):
    return lambda b, h, q, k: chosen[b, h, q // tile, k // tile]


def padding(sizes, tile):
    return lambda b, h, q, k: k % tile < sizes[k // tile]


def ring_shard(b, h, q, k, _q_start=16, _k_start=4):
    return q + _q_start >= k + _k_start


def alibi(heads):
    return lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / heads)) * (k - q)


def softcap(cap):
    return lambda s, b, h, q, k: cap * torch.tanh(s / cap)


def activation(f, offset=1.0):
    return lambda s, b, h, q, k: torch.log(f(s) + offset)


def sandwich(heads, length):
    table = real(2 * length - 1)
    ratio = heads / (8.0 * torch.arange(1, heads + 1))
    return lambda s, b, h, q, k: s + table[q - k + length - 1] * ratio[h]


def graphormer(spatial, edges, distance, types, lengths):
    steps = types.shape[-1]

    def score(s, b, h, q, k):
        total = s + spatial[h, distance[b, q, k]]
        n = lengths[b, q, k]
        along = 0.0
        for i in range(steps):
            along = along + torch.where(n > i, edges[h, i, types[b, q, k, i]], 0.0)
        return total + along / n.clamp(min=1)

    return score


def rope_part(q_rope, k_rope, heads, scale):
    return lambda s, b, h, q, k: s + scale * torch.dot(q_rope[b, h, q], k_rope[b, h // heads, k])


def t5_buckets(table, exact=8, buckets=16, longest=64):
    def score(s, b, h, q, k):
        distance = torch.clamp(q - k, min=0)
        far = (
            exact
            + (
                torch.log(torch.clamp(distance, min=1) / exact)
                / math.log(longest / exact)
                * (buckets - exact)
            ).long()
        )
        bucket = torch.where(distance < exact, distance, torch.clamp(far, max=buckets - 1))
        return s + table[h, bucket]

    return score


def penalty(amount):
    return lambda s, b, h, q, k: torch.where(torch.where(q > k, False, True), s - amount, s)


ENDS = torch.tensor([0, 10, 30, SEQ])
CHOSEN = torch.rand(SEQ, generator=_rng) > 0.8
ANCESTORS = torch.rand(48, 48, generator=_rng) > 0.5
SIZES = whole(1, 9, 8)

GALLERY: dict[str, tuple[str, Callable[..., Any]]] = {
    "no mask": ("mask", lambda b, h, q, k: q.new_ones((), dtype=torch.bool)),
    "causal": ("mask", causal),
    "sliding window": ("mask", window(9)),
    "prefix": ("mask", prefix(20)),
    "dilated window": ("mask", dilated(8, 2)),
    "global tokens": ("mask", global_tokens(6, CHOSEN)),
    "batches in one": ("mask", batches_of(causal, 16)),
    "documents": ("mask", documents(causal, ENDS)),
    "packed causal documents": ("mask", packed_causal(ENDS)),
    "shared prefix": ("mask", shared_prefix(ENDS, torch.tensor([0, 0, 0]))),
    "images and text": ("mask", flamingo(torch.tensor([[0, 30], [30, 64]]), 32)),
    "block diffusion": ("mask", block_diffusion(32, 4)),
    "tree": ("mask", tree(16, ANCESTORS)),
    "tree in training": ("mask", tree_training(16, 8)),
    "neighbourhood": ("mask", neighbourhood(8, 8, 3)),
    "neighbourhood in tiles": ("mask", neighbourhood(8, 8, 3, in_tiles)),
    "neighbourhood in Morton order": ("mask", neighbourhood(8, 8, 3, in_morton_order)),
    "sliding tiles in two dimensions": ("mask", sliding_tiles((8, 8), (2, 2), 1)),
    "sliding tiles in three dimensions": ("mask", sliding_tiles((4, 4, 4), (2, 2, 1), 1)),
    "spatial heads": ("mask", spatial_head(8, 6, 16)),
    "temporal heads": ("mask", temporal_head(8, 6, 16)),
    "chosen tiles": ("mask", chosen_tiles(whole(0, 8, BATCH, HEADS, 8, 3), 8, SIZES)),
    "map of tiles": ("mask", tile_map(torch.rand(BATCH, HEADS, 8, 8, generator=_rng) > 0.5, 8)),
    "padding in tiles": ("mask", padding(SIZES, 8)),
    "shard of a ring": ("mask", ring_shard),
    "nothing seen by some": ("mask", lambda b, h, q, k: (q > 5) & (q >= k)),
    "no change": ("score", lambda s, b, h, q, k: s),
    "ALiBi": ("score", alibi(HEADS)),
    "soft cap": ("score", softcap(2.0)),
    "gelu in place of exp": ("score", activation(torch.nn.functional.gelu)),
    "relu in place of exp": ("score", activation(torch.relu)),
    "sandwich": ("score", sandwich(HEADS, SEQ)),
    "graphormer": (
        "score",
        graphormer(
            real(HEADS, 6), real(HEADS, 3, 5), whole(0, 6, BATCH, SEQ, SEQ), whole(0, 5, BATCH, SEQ, SEQ, 3),
            whole(0, 4, BATCH, SEQ, SEQ),
        ),
    ),
    "rotary part of latent attention": (
        "score", rope_part(real(BATCH, HEADS, SEQ, 8), real(BATCH, 1, SEQ, 8), HEADS, 0.3)
    ),
    "T5 buckets": ("score", t5_buckets(real(HEADS, 16))),
    "penalty": ("score", penalty(1.5)),
    "causal as a score": ("score", lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf)),
}  # fmt: skip
