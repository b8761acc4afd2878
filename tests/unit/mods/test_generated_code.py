"""Generated C++ computes what PyTorch computes of the same mod, on the host, and compiles for GPUs."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from generated import Library
from random_functions import HEADS, SEQ, function, grid, tables
from test_added_terms import EVENLY, OTHERWISE

from flash_attention.mods import random
from flash_attention.mods.evaluate import evaluate
from flash_attention.mods.tracing import Traced, trace
from flash_helpers.build.nvcc import find_nvcc
from flash_helpers.build.sources import include_root
from flash_helpers.mods.added import added_terms
from flash_helpers.mods.ahead import copied_load, diagonal_value, streamed_axis, streamed_load
from flash_helpers.mods.cpp import HEADER, cpp_source, float_literal
from flash_helpers.mods.mod import Mod

pytestmark = pytest.mark.compile
N_RANDOM = 240


def compiler() -> list[str]:
    found = shutil.which("g++") or shutil.which("clang++")
    assert found, "no C++ compiler found: install g++"
    return [found]


def test_random_functions_on_the_host(tmp_path: Path) -> None:
    captured = tables(torch.Generator().manual_seed(0))
    made = [
        (kind, function(seed, kind, captured, depth=3 + seed % 2, smooth=True))
        for seed in range(N_RANDOM // 2)
        for kind in ("score", "mask")
    ]
    names = {"score": "score", "mask": "visible"}
    traced = [
        trace(f.function if kind == "score" else None, f.function if kind == "mask" else None)
        for kind, f in made
    ]
    library = Library(
        tmp_path, compiler(), [(t.mod, names[kind]) for t, (kind, _) in zip(traced, made, strict=True)]
    )
    score, *indices = grid(torch.Generator().manual_seed(1), torch.float32)
    for i, (t, (kind, f)) in enumerate(zip(traced, made, strict=True)):
        expected = evaluate(t, names[kind], score, *indices, dtype=torch.float32)
        found = library.run(i, t, score)
        expected = torch.broadcast_to(expected, found.shape).double()
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if kind == "score" else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(
            found, expected, equal_nan=True, **tolerance, msg=lambda m, f=f: f"{f.text}\n{m}"
        )


SMALLEST = -(2**31)


def test_numbers_at_the_ends_of_their_range(tmp_path: Path) -> None:
    functions = [
        lambda s, b, h, q, k: s + (torch.clamp(q - k, SMALLEST + 0, 2**31 - 1) % 7),
        lambda s, b, h, q, k: s + torch.maximum(k - q, torch.where(q > k, -2147483648, 2)) % 7,
        lambda s, b, h, q, k: s + ((q - k) // -2147483648 + (k * 0 - 2147483648) % 1000),
        lambda s, b, h, q, k: s + torch.minimum(q - k, q * 0 + -(2**63)) % 1000,
        lambda s, b, h, q, k: s + WORDS["distance"][h, ~(q % 2)] + ~(k // 8),
    ]
    traced = [trace(f) for f in functions]
    library = Library(tmp_path, compiler(), [(t.mod, "score") for t in traced])
    score, *indices = grid(torch.Generator().manual_seed(1), torch.float32)
    for i, (t, f) in enumerate(zip(traced, functions, strict=True)):
        expected = torch.broadcast_to(f(score, *indices), score.shape)
        torch.testing.assert_close(evaluate(t, "score", score, *indices), expected)
        torch.testing.assert_close(library.run(i, t, score).float(), expected)


WORDS = tables(torch.Generator().manual_seed(2))
ROWS = torch.randn(HEADS, SEQ, 16, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
AHEAD = {
    "slopes": lambda s, b, h, q, k: s + WORDS["slopes"][h] * (k - q),
    "slopes of a distance with an offset": lambda s, b, h, q, k: s - WORDS["slopes"][h] * abs(q + 3 - k),
    "a negative sum": lambda s, b, h, q, k: s + torch.exp(-(-k + q + h - 2) * 0.1),
    "buckets": lambda s, b, h, q, k: (
        s + WORDS["distance"][h, torch.where(q - k > 3, torch.log((q - k) / 1.7).long(), (k - q) % 5)]
    ),
    "a table of distances": lambda s, b, h, q, k: s + WORDS["distance"][h, q - k + SEQ - 1],
    "a table within the scores": lambda s, b, h, q, k: torch.tanh(s * WORDS["distance"][h, k - q]),
    "bias": lambda s, b, h, q, k: s + WORDS["bias"][b, h, q, k],
    "bias of aligned rows": lambda s, b, h, q, k: s + ROWS[h, q, k],
    "bias, row after row back": lambda s, b, h, q, k: s + ROWS[h, SEQ - 1 - q, k] * q,
    "bias, rows outside": lambda s, b, h, q, k: s + ROWS[h, q * 2 - 4, k],
    "bias of every other key": lambda s, b, h, q, k: s + ROWS[:, :, ::2][h, q, k],
    "bias, transposed": lambda s, b, h, q, k: s + ROWS.mT[h, q, k],
    "bias of float16": lambda s, b, h, q, k: s + ROWS.half()[h, q, k] + ROWS.half()[h, k, q],
    "bias and distance": lambda s, b, h, q, k: s + ROWS[h, q, k] + WORDS["distance"][h, q - k],
    "bias and a sum of a row": lambda s, b, h, q, k: (
        s * WORDS["distance"][h].sum(-1) + ROWS[h, q, k] + torch.dot(ROWS[h, q], ROWS[h, k]) * 0.1
    ),
}


def test_what_is_known_ahead_of_scores(tmp_path: Path) -> None:
    """Scores of a warp that are made of what it has found before are those that are computed one by one."""
    traced = {name: trace(function, None) for name, function in AHEAD.items()}
    captured = tables(torch.Generator().manual_seed(0))
    for seed in range(N_RANDOM // 2):
        found = trace(function(seed, "score", captured, depth=3, smooth=True).function, None)
        if streamed_load(found.mod) is not None or diagonal_value(found.mod) is not None:
            traced[str(seed)] = found
    assert len(traced) > len(AHEAD) + 5
    for name in AHEAD:
        of = streamed_load if name.startswith("bias") else diagonal_value
        assert of(traced[name].mod) is not None, name
    results = ("score", "score_ahead")
    library = Library(tmp_path, compiler(), [(t.mod, r) for t in traced.values() for r in results])
    score, *_ = grid(torch.Generator().manual_seed(1), torch.float32)
    for i, (name, t) in enumerate(traced.items()):
        one_by_one, ahead = (library.run(2 * i + j, t, score) for j in range(2))
        torch.testing.assert_close(
            ahead, one_by_one, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_what_is_added_of_the_distance(tmp_path: Path) -> None:
    """A score and what is added to it, evenly or not, are what is computed of each place."""
    functions = AHEAD | {f"{name}, evenly": f for name, f in EVENLY.items()} | OTHERWISE
    traced = {name: trace(function, None) for name, function in functions.items()}
    known = {name: t for name, t in traced.items() if added_terms(t.mod)}
    assert len(known) > len(EVENLY) + len(OTHERWISE)
    mods = [(t.mod, r) for t in known.values() for r in ("score", "added")]
    library = Library(tmp_path, compiler(), mods)
    score, *_ = grid(torch.Generator().manual_seed(1), torch.float32)
    for i, (name, t) in enumerate(known.items()):
        one_by_one, added = (library.run(2 * i + j, t, score) for j in range(2))
        torch.testing.assert_close(
            added, one_by_one, rtol=1e-6, atol=2e-6, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


# That copies bring: rows that lie one key beside the other, begin at multiples of 16 bytes, and are counted
# by queries.
COPIED = {
    "a tensor": lambda s, b, h, q, k: s + ROWS[h, q, k],
    "of all heads": lambda s, b, h, q, k: s * 0.5 - ROWS[1, q, k],
    "of two dimensions": lambda s, b, h, q, k: s + ROWS[0][q, k],
    "of four": lambda s, b, h, q, k: s + FOUR[b, h // 2, q, k],
    "of four, some repeated": lambda s, b, h, q, k: s + FOUR[:, :1].expand(-1, HEADS, -1, -1)[b, h, q, k],
    "heads within rows": lambda s, b, h, q, k: s + FOUR[1].transpose(0, 1)[q, h // 2, k],
    "counted from the end": lambda s, b, h, q, k: s + FOUR[b - 2, -1, q, k],
    "heads outside": lambda s, b, h, q, k: s + ROWS[h * 2 - 2, q, k],
    "shorter than the sequence": lambda s, b, h, q, k: s + ROWS[:, : SEQ - 3, : SEQ - 5][h, q, k],
    "of float16": lambda s, b, h, q, k: s + ROWS.half()[h, q, k],
    "and a distance": lambda s, b, h, q, k: s + ROWS[h, q, k] + WORDS["distance"][h, q - k],
}  # fmt: skip
FOUR = torch.randn(2, 2, SEQ, 24, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
NOT_COPIED = {
    "every other key": lambda s, b, h, q, k: s + ROWS[:, :, ::2][h, q, k],
    "an odd address": lambda s, b, h, q, k: s + ROWS[:, :, 1:][h, q, k],
    "an odd stride": lambda s, b, h, q, k: s + ROWS[:, :, :13].contiguous()[h, q, k],
    "one row for all": lambda s, b, h, q, k: s + ROWS[:, :1].expand(-1, SEQ, -1)[h, q, k],
    "no keys": lambda s, b, h, q, k: s + ROWS[:, :, :0][h, q, k],
}


def test_what_copies_bring(tmp_path: Path) -> None:
    traced = {name: trace(function, None) for name, function in {**COPIED, **NOT_COPIED}.items()}
    assert all(copied_load(t.mod) is not None for t in traced.values())  # as the kernel's headers see it
    results = ("score", "score_ahead of copies")
    library = Library(tmp_path, compiler(), [(t.mod, r) for t in traced.values() for r in results])
    score, *_ = grid(torch.Generator().manual_seed(1), torch.float32)
    for i, (name, t) in enumerate(traced.items()):
        one_by_one, copied = (library.run(2 * i + j, t, score) for j in range(2))
        if name in NOT_COPIED:
            assert copied.isnan().all(), name
        else:
            torch.testing.assert_close(copied, one_by_one, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def known_of_columns(mod: Mod) -> bool:
    streams = streamed_load(mod) is not None
    return (streams and streamed_axis(mod) is not None) or (not streams and diagonal_value(mod) is not None)


def test_what_is_known_ahead_of_columns(tmp_path: Path) -> None:
    """The same where rows of the scores are keys, as in kernels of gradients."""
    traced = {name: trace(function, None) for name, function in AHEAD.items()}
    known = {name: t for name, t in traced.items() if known_of_columns(t.mod)}
    assert set(traced) - set(known) == {"bias, row after row back", "bias, rows outside"}
    mods = [(t.mod, r) for t in known.values() for r in ("score", "score_ahead of columns")]
    library = Library(tmp_path, compiler(), mods)
    score, *_ = grid(torch.Generator().manual_seed(1), torch.float32)
    for i, (name, t) in enumerate(known.items()):
        one_by_one, ahead = (library.run(2 * i + j, t, score) for j in range(2))
        torch.testing.assert_close(
            ahead, one_by_one, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("function", "axis"),
    [
        (lambda s, b, h, q, k: s + ROWS[h, q, k], 1),
        (lambda s, b, h, q, k: s + ROWS.transpose(0, 1)[q, h, k], 0),
        (lambda s, b, h, q, k: s + ROWS[h, q + 1, k], None),
        (lambda s, b, h, q, k: s + ROWS[q % 3, q, k], None),
        (lambda s, b, h, q, k: s + ROWS[h, k, q], None),
    ],
)
def test_rows_of_queries_are_equally_far_apart_where_the_query_is_the_index(function, axis) -> None:
    assert streamed_axis(trace(function, None).mod) == axis


def test_division_by_a_constant_is_exact(tmp_path: Path) -> None:
    """The short form of a division rounds as a division does, of any finite number that is no subnormal."""
    values = torch.randn(1, 1, 1, 4096, generator=torch.Generator().manual_seed(4)) * 2.0 ** torch.randint(
        -90, 90, (4096,), generator=torch.Generator().manual_seed(5)
    )
    values[..., :4] = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    text = (
        '#include "common/mod_values.cuh"\n'
        'extern "C" void run(int n, const float *x, const float *by, float *out) {'
        "for (int i = 0; i < n; ++i) out[i] = flash::mods::divided(x[i], *by, 1.0f / *by); }"
    )
    (tmp_path / "divided.cpp").write_text(text)
    command = [
        *compiler(),
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        f"-I{include_root()}",
    ]
    subprocess.run([*command, str(tmp_path / "divided.cpp"), "-o", str(tmp_path / "divided.so")], check=True)
    library, given = ctypes.CDLL(str(tmp_path / "divided.so")), values.flatten().numpy()
    for by in (3.0, -7.25, math.log(8), 1e-5, 1e20):
        divisor, out = np.float32(by), np.empty_like(given)
        by_array = np.asarray([divisor])
        pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (given, by_array, out)]
        library.run(given.size, *pointers)
        expected = given / divisor
        usable = (abs(expected) > 1e-37) | (given == 0)
        np.testing.assert_array_equal(out[usable], expected[usable])
        np.testing.assert_array_equal(np.signbit(out), np.signbit(expected))


SMALLEST = -(2**63)
TABLE = torch.arange(1, 6)  # 5 values, beside which there is nothing
LARGE = torch.tensor([2**31 - 1, -(2**31), 5, -1], dtype=torch.int32)
FAR = torch.tensor([2**32 + 1, -(2**32) - 2, 2**31, 3])  # whose lower 32 bits are places in TABLE
HALVES = torch.tensor([1.0, -2.5, 6e-8, 65504.0, math.inf, -0.0, 1.0 / 3, math.nan, 3e-5, 0.0, 7.0])
EDGES = {
    "outside of a tensor": lambda s, b, h, q, k: TABLE[q - k - 1] + s,
    "outside, by a product": lambda s, b, h, q, k: TABLE[(q - 5) * 2**40] + TABLE[q * 2**62] + s,
    "of a row of two": lambda s, b, h, q, k: TABLE.view(5, 1)[q, k - 1] + s,
    "no values": lambda s, b, h, q, k: TABLE[:0][q] + s,
    "whole division by 0": lambda s, b, h, q, k: (q - 5) // (k - 4) + ((q - 5) % (k - 4)) * 0.5 + 0 * s,
    "real division by 0": lambda s, b, h, q, k: (q - 5) / (k - 4) + 0 * s,
    "shifts": lambda s, b, h, q, k: ((q - 5) << (k * 9 - 9)) + ((q - 5) >> (k * 9 - 9)) + 0 * s,
    "beyond 32 bits": lambda s, b, h, q, k: (
        (LARGE[q % 4] + k + LARGE[k % 4] * 3) % 1000 + (LARGE[q % 4] > LARGE[k % 4] - k) * 0.5 + 0 * s
    ),
    "products beyond 32 bits": lambda s, b, h, q, k: ((LARGE[q % 4] * LARGE[k % 4]) % 1000) * 1.0 + 0 * s,
    "an index of 64 bits": lambda s, b, h, q, k: TABLE[FAR[k % 4]] + TABLE[FAR[q % 4] % 4] * 0.1 + 0 * s,
    "wrapping sums": lambda s, b, h, q, k: ((q * 2**60 + k * 2**59 + 2**62) % 1000) + 0 * s,
    "wrapping products": lambda s, b, h, q, k: ((q * 2**40 - 7) * (k * 2**39 + 3) * 5 % 1000) + 0 * s,
    "the smallest number": lambda s, b, h, q, k: (
        torch.where(q > 2, (SMALLEST + k * 0) // (k - 2), -(SMALLEST + k * 0) + torch.abs(SMALLEST + k * 0))
        * 1e-18
        + 0 * s
    ),
    "real to whole": lambda s, b, h, q, k: (
        (torch.where(k > 4, (q - 5) * 1e18 / (k - 6), (q - 5) / 2.0)).long() * 1.0 + 0 * s
    ),
    "real floor": lambda s, b, h, q, k: ((q - 5) * 0.5) // (k - 4.5) + ((q - 5) * 0.5) % (k - 4.5) + 0 * s,
    "real modulo 0": lambda s, b, h, q, k: ((q - 5) * 0.5) % ((k - 4) * 0.25) + 0 * s,
    "rounding": lambda s, b, h, q, k: (
        torch.round((q - 5) / 2.0)
        + torch.floor((k - 5) / 2.0) * 100
        + torch.trunc((k - 5) / 3.0) * 10
        + 0 * s
    ),
    "maxima with NaN": lambda s, b, h, q, k: (
        torch.maximum(HALVES[q], HALVES[k]) + torch.minimum(HALVES[k], HALVES[q]) + 0 * s
    ),
    "float16": lambda s, b, h, q, k: HALVES.half()[q] + 0 * s,
    "bfloat16": lambda s, b, h, q, k: HALVES.bfloat16()[q] + 0 * s,
    "infinite constants": lambda s, b, h, q, k: torch.where(
        q > k, -math.inf, torch.where(q == k, math.nan, s)
    ),
    "a dot product": lambda s, b, h, q, k: (
        s + torch.dot(HALVES[:6].float().view(2, 3)[q % 2], TABLE.float()[:3])
    ),
    "any of a row": lambda s, b, h, q, k: torch.where((TABLE[:4].view(2, 2)[k % 2] == q).any(-1), s, 0.0),
    "the largest of a row": lambda s, b, h, q, k: (
        s + (TABLE.view(1, 5)[b * 0] - q).abs().amax(-1) + (TABLE * 1.5).amin(-1) * k
    ),
    "random numbers": lambda s, b, h, q, k: (
        random(7, b, h, q, k) + random(-(2**40) - 3, k, q, h, b + 2**33) + 0 * s
    ),
    "random numbers of a query": lambda s, b, h, q, k: (
        random(q * 2**40, 0, h, q, 3) - random(h, b, 1, k, -q) + 0 * s
    ),
    "powers": lambda s, b, h, q, k: (q - 5) ** 3 + 2**k + (q + 0.5) ** -1.5 + s**2 + 0 * s,
    "a scalar": lambda s, b, h, q, k: s * torch.tensor(0.1) + torch.tensor(3),
    "bools": lambda s, b, h, q, k: (
        (q > 3) * s + ((q > 3) + (k > 3)) * 2.0 + (q > k).long() - ((q > 3) ^ (k > 2)) * 1.0
    ),
}


def test_what_c_leaves_open(tmp_path: Path) -> None:
    traced = {name: trace(f) for name, f in EDGES.items()}
    library = Library(tmp_path, compiler(), [(t.mod, "score") for t in traced.values()])
    score, *indices = grid(torch.Generator().manual_seed(1), torch.float32)
    for i, (name, t) in enumerate(traced.items()):
        expected = torch.broadcast_to(evaluate(t, "score", score, *indices, dtype=torch.float32), score.shape)
        found = library.run(i, t, score)
        torch.testing.assert_close(
            found,
            expected.double(),
            rtol=2e-6,
            atol=1e-6,
            equal_nan=True,
            msg=lambda m, name=name: f"{name}\n{m}",
        )


KERNEL = """#include "{header}"
{mod}
__global__ void kernel({name}::Captured captured, const float *score, float *out, int n_keys) {{
    const int b = blockIdx.z, h = blockIdx.y, q = blockIdx.x * blockDim.x + threadIdx.x;
    const auto once = {name}::once(captured);
    const auto head = {name}::head(captured, once, b, h);
    const auto row = {name}::row(captured, once, head, b, h, q);
    for (int k = 0; k < n_keys; ++k) {{
        const auto column = {name}::column(captured, once, head, b, h, k);
        const int64_t at = int64_t(q) * n_keys + k;
        const float s = {name}::score(captured, once, head, row, column, score[at], b, h, q, k);
        out[at] = {name}::visible(captured, once, head, row, column, score[at], b, h, q, k) ? s : -INFINITY;
    }}
}}
"""


def everything() -> Traced:
    """One mod that uses every operation with a function of its own in the header."""
    captured = tables(torch.Generator().manual_seed(0))
    scores = [
        *(f for f in EDGES.values()),
        *(function(seed, "score", captured).function for seed in range(8)),
    ]
    masks = [function(seed, "mask", captured).function for seed in range(8)]

    def score(s, b, h, q, k):
        for f in scores:
            s = f(s, b, h, q, k)
        return torch.expm1(torch.log2(torch.abs(s)) ** 1.5)

    def mask(b, h, q, k):
        seen = q >= k
        for f in masks:
            seen = seen ^ f(b, h, q, k)
        return seen

    return trace(score, mask)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_gpu_compiler_takes_every_operation(tmp_path: Path, arch: str) -> None:
    mod = everything().mod
    name = mod.id
    (tmp_path / "mod.cu").write_text(KERNEL.format(header=HEADER, mod=cpp_source(mod), name=name))
    flags = ["-std=c++20", "-O3", "-Xptxas", "-v", f"-arch={arch}", "-cubin", "-o", "mod.cubin"]
    command = [str(find_nvcc().path), *flags, f"-I{include_root()}", "mod.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    assert "warning" not in done.stderr
    assert re.search(r"0 bytes spill stores", done.stderr), done.stderr[-600:]


def test_literals_are_exact() -> None:
    for value in (0.1, -2.5, 1e-42, 3.4e38, 1e39, -math.inf):
        text = float_literal(value).strip("()").removesuffix("f")
        near = torch.tensor(value, dtype=torch.float32).item()
        assert ("kInfinity" in text) if math.isinf(near) else (float.fromhex(text) == near)
    assert "kNaN" in float_literal(math.nan)
