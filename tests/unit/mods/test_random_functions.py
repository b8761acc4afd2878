"""Random bits of a place: known answers, statistics, and the same from Python, PyTorch, a mod and C++."""

from __future__ import annotations

import math
import random as chance

import numpy as np
import pytest
import torch

from flash_attention.errors import ModError
from flash_attention.mods import philox as by_torch
from flash_attention.mods import random, trace
from flash_attention.mods.evaluate import evaluate
from flash_helpers.mods.cpp import cpp_source
from flash_helpers.mods.operations import OPERATIONS
from flash_helpers.mods.philox import philox, random_real, random_word, threshold
from flash_helpers.mods.stages import Stage, stages

ONES = 2**32 - 1
# Of Random123, the paper's own library: counter, key, words of philox4x32-10.
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = [0, 1, -1, -7123456789012345678, 2**62 + 12345]


@pytest.mark.parametrize(("counter", "seed", "words"), KNOWN)
def test_known_answers(counter: tuple[int, int, int, int], seed: int, words: tuple[int, ...]) -> None:
    assert philox(counter, seed) == words
    signed = seed - 2**64 if seed >= 2**63 else seed
    tensors = tuple(torch.tensor(x) for x in counter)
    assert tuple(int(x) for x in by_torch.philox(tensors, torch.tensor(signed))) == words  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_places_and_numbers_agree(seed: int) -> None:
    b, h, queries, keys = torch.tensor([0, 5]), torch.tensor([1, 2, 9]), range(3, 50), range(5, 40)
    words = by_torch.random_words(torch.tensor(seed), b[:, None, None, None], h[:, None, None], queries, keys)
    assert words.shape == (2, 3, 47, 35)
    for _ in range(200):
        i, j, q, k = (chance.randrange(n) for n in words.shape)
        assert int(words[i, j, q, k]) == random_word(seed, int(b[i]), int(h[j]), q + 3, k + 5)
    places = b[:, None, None, None], h[:, None, None], torch.arange(3, 50)[:, None], torch.arange(5, 40)
    reals = random(torch.tensor(seed), *places)
    assert torch.equal(reals, (words >> 8).float() * 2.0**-24)
    assert float(reals[1, 2, 7, 8]) == random_real(seed, 5, 9, 10, 13)


def test_parts_of_a_block_have_the_bits_of_the_whole() -> None:
    seed, b, h = torch.tensor(99), torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)
    whole = by_torch.random_words(seed, b, h, range(100), range(100))
    for _ in range(50):
        q, k = sorted(chance.sample(range(101), 2)), sorted(chance.sample(range(101), 2))
        part = by_torch.random_words(seed, b, h, range(*q), range(*k))
        assert torch.equal(part, whole[..., slice(*q), slice(*k)])


# ---------------------------------------------------------------------- statistics
def words_of(seed: int) -> np.ndarray:
    """Of 4 items, 4 heads, 256 queries and 256 keys: a million."""
    b, h = torch.arange(4)[:, None, None, None], torch.arange(4)[:, None, None]
    return by_torch.random_words(torch.tensor(seed), b, h, range(256), range(256)).numpy()


@pytest.mark.parametrize("seed", SEEDS[2:4])
def test_words_are_uniform(seed: int) -> None:
    words = words_of(seed)
    counts = np.bincount((words >> 22).ravel(), minlength=1024)  # of each of 1,024 ranges
    expected = words.size / 1024
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 1023) < 6 * math.sqrt(2 * 1023)
    for bit in range(32):
        share = ((words >> bit) & 1).mean()
        assert abs(share - 0.5) < 6 * 0.5 / math.sqrt(words.size)
    assert len(np.unique(words)) > 0.9995 * words.size


@pytest.mark.parametrize("seed", SEEDS[2:4])
def test_neighbours_are_not_correlated(seed: int) -> None:
    """Along every axis, at distances within one counter and beyond; bits of one word, too."""
    x = words_of(seed) / 2.0**32 - 0.5
    limit = 6 / math.sqrt(x.size / 2) / 12
    for axis, distances in {0: (1, 2), 1: (1, 2), 2: (1, 4, 8, 16, 64), 3: (1, 2, 3, 8, 64)}.items():
        for distance in distances:
            n = x.shape[axis]
            products = x.take(range(n - distance), axis) * x.take(range(distance, n), axis)
            assert abs(products.mean()) < limit, (axis, distance)
    other = words_of(seed + 1) / 2.0**32 - 0.5
    assert abs((x * other).mean()) < limit


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1e-3])
def test_as_many_are_dropped_as_the_probability_says(p: float) -> None:
    dropped = words_of(7) < threshold(p)
    assert abs(dropped.mean() - p) < 6 * math.sqrt(p * (1 - p) / dropped.size)
    rows = dropped.mean((0, 1, 3))  # of each query
    assert np.abs(rows - p).max() < 6 * math.sqrt(p * (1 - p) / (dropped.size / 256))


def test_the_ends_of_the_threshold() -> None:
    assert threshold(0.0) == 0
    assert threshold(1 - 2**-53) == ONES
    assert threshold(0.5) == 2**31


# ---------------------------------------------------------------------- in mods
def test_a_mod_draws_the_bits_of_its_place() -> None:
    seed = 1234
    traced = trace(
        lambda s, b, h, q, k: s + random(seed, b, h, q, k), lambda b, h, q, k: random(seed, b, h, q, k) > 0.25
    )
    assert traced.numbers == (seed,)
    assert str(traced.mod).count("random(n0, b, h, q, k)") == 1
    places = (
        torch.arange(2)[:, None, None, None],
        torch.arange(3)[:, None, None],
        torch.arange(9)[:, None],
        torch.arange(7),
    )
    found = evaluate(traced, "score", torch.zeros(2, 3, 9, 7), *places)
    expected = [
        [[[random_real(seed, b, h, q, k) for k in range(7)] for q in range(9)] for h in range(3)]
        for b in range(2)
    ]
    assert torch.equal(found, torch.tensor(expected, dtype=torch.float32))
    assert torch.equal(evaluate(traced, "visible", None, *places), found > 0.25)


def test_a_seed_in_a_tensor_is_read_when_the_call_runs() -> None:
    seed = torch.tensor([3], dtype=torch.int64)
    traced = trace(lambda s, b, h, q, k: s + random(seed[0 * b], b, h, q, k))
    assert traced.mod.uses("load")
    zero = torch.tensor(0)
    first = evaluate(traced, "score", torch.zeros(()), zero, zero, zero, zero)
    seed.fill_(4)
    assert not torch.equal(evaluate(traced, "score", torch.zeros(()), zero, zero, zero, zero), first)


def test_numbers_of_a_query_are_drawn_once_a_query() -> None:
    traced = trace(lambda s, b, h, q, k: torch.where(random(1, b, h, q, 0) < 0.5, s, 0.0))
    place = next(i for i, node in enumerate(traced.mod.nodes) if node.op == "random")
    assert stages(traced.mod)[place] is Stage.ROW
    assert "flash::mods::random(1, b_index, h_index, q_index, 0)" in cpp_source(traced.mod)


def test_constants_are_computed_and_real_numbers_refused() -> None:
    traced = trace(lambda s, b, h, q, k: s + random(b * 0 + 5, 1, 2, 3, 4))
    assert OPERATIONS["random"].value(5, 1, 2, 3, 4) == random_real(5, 1, 2, 3, 4)
    assert traced.mod.uses("random")
    with pytest.raises(ModError, match="random takes a whole number"):
        trace(lambda s, b, h, q, k: random(s, b, h, q, k))
    with pytest.raises(ModError, match="random takes whole numbers, and was given a real one"):
        random(torch.tensor(0.5), 1, 2, 3, 4)
