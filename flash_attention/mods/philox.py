"""Random bits of many places at once, with PyTorch: ``flash_helpers.mods.philox`` says which."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_helpers.mods.philox import KEY_STEPS, MULTIPLIERS, REAL_BITS, ROUNDS, WORD

_MASK = WORD - 1


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, ...]:
    """Four words below 2^32 of each counter. All are int64, and what is given broadcasts."""
    x0, x1, x2, x3 = counter
    key0, key1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * x0, MULTIPLIERS[1] * x2  # their 64 bits, whatever the sign
        x0, x1 = ((product1 >> 32) & _MASK) ^ x1 ^ key0, product1 & _MASK
        x2, x3 = ((product0 >> 32) & _MASK) ^ x3 ^ key1, product0 & _MASK
        key0, key1 = (key0 + KEY_STEPS[0]) & _MASK, (key1 + KEY_STEPS[1]) & _MASK
    return x0, x1, x2, x3


def random_reals(dtype: torch.dtype, seed: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A random number in [0, 1) for each place of tensors that broadcast."""
    seed, b, h, q, k = (x.long() for x in (seed, b, h, q, k))
    b, h, q, k = (x & _MASK for x in (b, h, q, k))
    words = philox((k >> 1, (q >> 4 << 3) | (q & 7), h, b), seed)
    high = (q & 8) != 0
    word = torch.where(
        (k & 1) != 0, torch.where(high, words[3], words[1]), torch.where(high, words[2], words[0])
    )
    return (word >> (32 - REAL_BITS)).to(dtype) * 2.0**-REAL_BITS


def random_words(seed: Tensor, b: Tensor, h: Tensor, queries: range, keys: range) -> Tensor:
    """The words of a block, (…, queries, keys) int64.

    Args:
        seed: (), int64.
        b, h: of shapes that broadcast to (…, 1, 1).
        queries: of the block, one behind the other.
        keys: likewise.
    """
    device = seed.device
    first_row, first_pair = queries.start // 16, keys.start // 2
    rows = torch.arange(first_row * 8, -(-queries.stop // 16) * 8, device=device)
    pairs = torch.arange(first_pair, -(-keys.stop // 2), device=device)
    words = philox((pairs, rows[:, None], h.long(), b.long()), seed)
    pairs_of = [torch.stack(torch.broadcast_tensors(*words[i : i + 2]), -1).flatten(-2) for i in (0, 2)]
    # (…, blocks of 16 queries, half of the block, 8 queries, keys)
    halves = torch.stack([x.unflatten(-2, (-1, 8)) for x in pairs_of], -3)
    made = halves.flatten(-4, -2)
    q, k = queries.start - first_row * 16, keys.start - first_pair * 2
    return made[..., q : q + len(queries), k : k + len(keys)]
