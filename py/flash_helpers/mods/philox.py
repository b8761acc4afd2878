"""Random bits of a place in the scores: Philox 4x32-10, the same on every device and for every tile.

The key is a seed of 64 bits; the counter is made of the place alone. One counter gives four words, for the
four elements that a thread holds of 16 rows of an accumulator: queries i and i + 8, keys j and j + 1.

    counter = (k // 2, q without its bit 3, h, b)        word = k % 2 + 2 * (bit 3 of q)

``src/include/common/philox.cuh`` and ``flash_attention/mods/philox.py`` compute the same.
"""

from __future__ import annotations

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 2**32
REAL_BITS = 24  # of a real number in [0, 1): float32 holds them exactly


def philox(counter: tuple[int, int, int, int], seed: int) -> tuple[int, int, int, int]:
    """Four words of 32 bits."""
    x0, x1, x2, x3 = counter
    key0, key1 = seed % WORD, seed // WORD % WORD
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * x0, MULTIPLIERS[1] * x2
        x0, x1 = product1 // WORD ^ x1 ^ key0, product1 % WORD
        x2, x3 = product0 // WORD ^ x3 ^ key1, product0 % WORD
        key0, key1 = (key0 + KEY_STEPS[0]) % WORD, (key1 + KEY_STEPS[1]) % WORD
    return x0, x1, x2, x3


def random_word(seed: int, b: int, h: int, q: int, k: int) -> int:
    """The 32 random bits of a place."""
    b, h, q, k = (index % WORD for index in (b, h, q, k))
    row = q // 16 * 8 + q % 8
    return philox((k // 2, row, h, b), seed)[k % 2 + q // 8 % 2 * 2]


def random_real(seed: int, b: int, h: int, q: int, k: int) -> float:
    """A random number in [0, 1), of the first ``REAL_BITS`` of these bits."""
    return (random_word(seed, b, h, q, k) >> (32 - REAL_BITS)) / 2**REAL_BITS


def threshold(p: float) -> int:
    """A place is dropped where its word is below this: with probability p, to 2^-32."""
    return min(round(p * WORD), WORD - 1)
