"""Compiles generated mods for the host and runs them over a grid of scores."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_functions import BATCH, HEADS, SEQ

from flash_attention.mods.tracing import Traced
from flash_helpers.build.sources import include_root
from flash_helpers.mods.cpp import HEADER, cpp_source
from flash_helpers.mods.mod import Mod
from flash_helpers.mods.operations import Kind

FAKE_CUDA = Path(__file__).parents[2] / "cpp" / "fake_cuda"

ONE = """
extern "C" void run_{i}(const int64_t *whole, const double *real, void *const *data, const int64_t *strides,
                        const int *sizes, const float *score, double *out) {{
    using M = {name};
    const M::Captured captured{{{captured}}};
    const auto once = M::once(captured);
    for (int b = 0; b < {batch}; ++b) for (int h = 0; h < {heads}; ++h) {{
        const auto head = M::head(captured, once, b, h);
        for (int q = 0; q < {seq}; ++q) {{
            const auto row = M::row(captured, once, head, b, h, q);
            for (int k = 0; k < {seq}; ++k) {{
                const auto column = M::column(captured, once, head, b, h, k);
                const int at = ((b * {heads} + h) * {seq} + q) * {seq} + k;
                out[at] = double(M::{result}(captured, once, head, row, column, score[at], b, h, q, k));
            }}
        }}
    }}
}}
"""


AHEAD = """
extern "C" void run_{i}(const int64_t *whole, const double *real, void *const *data, const int64_t *strides,
                        const int *sizes, const float *score, double *out) {{
    using M = {name};
    const M::Captured captured{{{captured}}};
    constexpr int kSquares = 4;
    for (int b = 0; b < {batch}; ++b) for (int h = 0; h < {heads}; ++h) FakeWarp::run(0, [&] {{
        const int lane = FakeWarp::lane(), first = lane / 4;
        const auto once = M::once(captured);
        const auto head = M::head(captured, once, b, h);
        flash::AheadOfScores<M, kSquares, {group}> known;
        known.find(captured, b, h, first, 0, lane);
        for (int n = 0; n < kSquares; ++n) {{
            if (n % {group} == 0) known.find_group(captured, b, h, first, 8 * n, lane);
            for (int i = 0; i < 4; ++i) {{
                const auto [q, k] = flash::accumulator(lane, 4 * n + i);
                const auto row = M::row(captured, once, head, b, h, q);
                const auto column = M::column(captured, once, head, b, h, k);
                const auto ahead = known.at(i / 2, n, i % 2);
                if (q >= {seq} || k >= {seq}) continue;
                const int at = ((b * {heads} + h) * {seq} + q) * {seq} + k;
                out[at] = double(
                    M::score_ahead(captured, once, head, row, column, ahead, score[at], b, h, q, k));
            }}
        }}
    }});
}}
"""


AHEAD_OF_COLUMNS = """
extern "C" void run_{i}(const int64_t *whole, const double *real, void *const *data, const int64_t *strides,
                        const int *sizes, const float *score, double *out) {{
    using M = {name};
    static_assert(flash::knows_columns_ahead<M>);
    const M::Captured captured{{{captured}}};
    constexpr int kSquares = {group};
    for (int b = 0; b < {batch}; ++b) for (int h = 0; h < {heads}; ++h)
    for (int first = 0; first < {seq}; first += 8 * kSquares) FakeWarp::run(0, [&] {{
        const int lane = FakeWarp::lane();
        const auto once = M::once(captured);
        const auto head = M::head(captured, once, b, h);
        flash::AheadOfColumns<M, kSquares> known;
        known.read(captured, b, h, first, 0, lane);
        known.arrange();
        for (int n = 0; n < kSquares; ++n) for (int i = 0; i < 4; ++i) {{
            const auto [k, of_block] = flash::accumulator(lane, 4 * n + i);
            const int q = first + of_block;
            if (q >= {seq} || k >= {seq}) continue;
            const float diagonal = diagonal_of<M>(captured, once, head, b, h, k - q);
            const auto row = M::row(captured, once, head, b, h, q);
            const auto column = M::column(captured, once, head, b, h, k);
            const auto ahead = known.at(i / 2, n, i % 2, diagonal);
            const int at = ((b * {heads} + h) * {seq} + q) * {seq} + k;
            out[at] = double(
                M::score_ahead(captured, once, head, row, column, ahead, score[at], b, h, q, k));
        }}
    }});
}}
"""
OF_COPIES = """
extern "C" void run_{i}(const int64_t *whole, const double *real, void *const *data, const int64_t *strides,
                        const int *sizes, const float *score, double *out) {{
    using M = {name};
    static_assert(flash::streams_tiles<M>);
    const M::Captured captured{{{captured}}};
    const flash::CapturedTensor tensors[] = {{{tensors}}};
    flash::tma::TensorView view{{}};
    const bool copied = flash::hopper::view_streamed<M>({{nullptr, tensors, {{}}}}, view);
    using Element = decltype(M::streamed_row(M::Row{{}}))::Element;
    for (int b = 0; b < {batch}; ++b) for (int h = 0; h < {heads}; ++h) {{
        const auto once = M::once(captured);
        const auto head = M::head(captured, once, b, h);
        const auto [item, outer] = M::streamed_place(captured, once, head, b, h);
        for (int q = 0; q < {seq}; ++q) for (int k = 0; k < {seq}; ++k) {{
            flash::mods::Ahead ahead{{0.0f, diagonal_of<M>(captured, once, head, b, h, k - q)}};
            if (uint64_t(item) < uint64_t(view.batch) && uint64_t(outer) < uint64_t(view.heads) &&
                q < view.seq && k < view.d) {{
                const auto *base = static_cast<const Element *>(view.base);
                const auto [of_item, of_row, of_outer] = view.strides;
                ahead.streamed = value_of(base[item * of_item + outer * of_outer + q * of_row + k]);
            }}
            const auto row = M::row(captured, once, head, b, h, q);
            const auto column = M::column(captured, once, head, b, h, k);
            const int at = ((b * {heads} + h) * {seq} + q) * {seq} + k;
            out[at] = copied ? double(M::score_ahead(captured, once, head, row, column, ahead, score[at], b,
                                                     h, q, k))
                             : NAN;
        }}
    }}
}}
"""
DIAGONAL = """
template <typename M, typename... Given>
float diagonal_of(const Given &...given) {
    if constexpr (flash::has_diagonal<M>) return M::diagonal(given...);
    return 0.0f;
}
"""
ADDED = """
extern "C" void run_{i}(const int64_t *whole, const double *real, void *const *data, const int64_t *strides,
                        const int *sizes, const float *score, double *out) {{
    using M = {name};
    static_assert(M::kAddsOfDistance);
    const M::Captured captured{{{captured}}};
    const auto once = M::once(captured);
    for (int b = 0; b < {batch}; ++b) for (int h = 0; h < {heads}; ++h) {{
        const auto head = M::head(captured, once, b, h);
        const auto added = [&](int distance) {{ return M::added(captured, once, head, b, h, distance); }};
        const float step = (added(1 << 14) - added(-(1 << 14))) * (0.5f / (1 << 14));
        for (int q = 0; q < {seq}; ++q) for (int k = 0; k < {seq}; ++k) {{
            const int at = ((b * {heads} + h) * {seq} + q) * {seq} + k;
            out[at] = score[at] + (M::kAddsEvenly ? added(0) + double(step) * (k - q) : added(k - q));
        }}
    }}
}}
"""
TEMPLATES = {
    "score_ahead": AHEAD,
    "score_ahead of columns": AHEAD_OF_COLUMNS,
    "score_ahead of copies": OF_COPIES,
    "added": ADDED,
}


def tensors_initializer(mod: Mod) -> str:
    """What a launch is told of the captured tensors, from the same arrays."""
    parts, at = [], 0
    for i, tensor in enumerate(mod.tensors):
        axes = range(at, at + tensor.n_dims)
        strides, sizes = (", ".join(f"{name}[{a}]" for a in axes) for name in ("strides", "sizes"))
        parts.append(f"{{data[{i}], {{{strides}}}, {{{sizes}}}}}")
        at += tensor.n_dims
    return ", ".join(parts)


def captured_initializer(mod: Mod) -> str:
    """The launch arguments of a mod from arrays of numbers, pointers, strides and sizes."""
    parts = [
        f"{number.cpp}({'real' if number.kind is Kind.FLOAT else 'whole'}[{i}])"
        for i, number in enumerate(mod.numbers)
    ]
    at = 0
    for i, tensor in enumerate(mod.tensors):
        axes = range(at, at + tensor.n_dims)
        strides = ", ".join(f"strides[{a}]" for a in axes)
        sizes = ", ".join(f"sizes[{a}]" for a in axes)
        parts.append(f"{{static_cast<const {tensor.element.cpp} *>(data[{i}]), {{{strides}}}, {{{sizes}}}}}")
        at += tensor.n_dims
    return ", ".join(parts)


def source(mods: list[tuple[Mod, str]]) -> str:
    """One unit with a function for each (mod, result); of those in ``TEMPLATES`` that of a warp's scores."""
    parts = [f'#include "{HEADER}"\n']
    if any(result in TEMPLATES for _, result in mods):
        parts = [
            '#include "common/ptx.cuh"\n#include "common/backward/ahead_of_columns.cuh"\n',
            '#include "hopper/forward/streamed_view.cuh"\n',
            *parts,
            DIAGONAL,
        ]
    for i, (mod, result) in enumerate(mods):
        parts.append(cpp_source(mod, f"M{i}"))
        parts.append(
            TEMPLATES.get(result, ONE).format(
                i=i,
                name=f"M{i}",
                captured=captured_initializer(mod),
                tensors=tensors_initializer(mod),
                result=result,
                group=2 + 2 * (i % 2),
                batch=BATCH,
                heads=HEADS,
                seq=SEQ,
            )
        )
    return "\n".join(parts)


def arguments(traced: Traced) -> list[ctypes.Array[Any]]:
    """What ``captured_initializer`` reads: whole and real numbers, pointers, strides and sizes."""

    def array(kind: Any, values: list[Any]) -> ctypes.Array[Any]:
        return (kind * max(1, len(values)))(*values)

    return [
        array(ctypes.c_int64, [int(x) if isinstance(x, int) else 0 for x in traced.numbers]),
        array(ctypes.c_double, [float(x) for x in traced.numbers]),
        array(ctypes.c_void_p, [t.data_ptr() for t in traced.tensors]),
        array(ctypes.c_int64, [s for t in traced.tensors for s in t.stride()]),
        array(ctypes.c_int, [s for t in traced.tensors for s in t.shape]),
    ]


class Library:
    """Generated mods, compiled by a C++ compiler."""

    def __init__(self, folder: Path, compiler: list[str], mods: list[tuple[Mod, str]]) -> None:
        text, library = folder / "mods.cpp", folder / "mods.so"
        text.write_text(source(mods), encoding="utf-8")
        command = [
            *compiler,
            "-std=c++20",
            "-O1",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            f"-I{FAKE_CUDA}",  # before the headers that it stands in for
            f"-I{include_root()}",
        ]
        done = subprocess.run([*command, str(text), "-o", str(library)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
        self.library = ctypes.CDLL(str(library))

    def run(self, i: int, traced: Traced, score: torch.Tensor) -> torch.Tensor:
        """The result of function i for float32 scores (BATCH, HEADS, SEQ, SEQ), as float64."""
        given = score.contiguous().numpy()
        out = np.empty(score.shape, np.float64)
        own = arguments(traced)  # ctypes passes their addresses
        rest = [x.ctypes.data_as(ctypes.c_void_p) for x in (given, out)]
        getattr(self.library, f"run_{i}")(*own, *rest)
        return torch.from_numpy(out)
