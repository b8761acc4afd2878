"""What generated mods tell of tiles: never wrong, and all of it where a mask is affine."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from gallery import GALLERY, SEQ
from generated import arguments, captured_initializer
from random_functions import function, tables

from flash_attention.mods.evaluate import evaluate
from flash_attention.mods.tracing import Traced, trace
from flash_helpers.build.sources import include_root
from flash_helpers.mods.cpp import HEADER, cpp_source
from flash_helpers.mods.mask_inputs import mask_inputs, needs_bits
from flash_helpers.mods.tiles import Tile, Tiling, tiles

pytestmark = pytest.mark.compile

N_RANDOM = 120
TILES = (16, 16)
ONE = """
extern "C" void tiles_{i}(const int64_t *whole, const double *real, void *const *data,
                          const int64_t *strides, const int *sizes, int *out) {{
    using M = {name};
    const M::Captured captured{{{captured}}};
    for (int q = 0; q < {seq}; q += {B_r}) for (int k = 0; k < {seq}; k += {B_c}) {{
        const auto found = M::tile(captured, 1, 1, q, q + {B_r} - 1, k, k + {B_c} - 1);
        *out++ = found.low ? 2 : found.high ? 1 : 0;
    }}
}}
"""


def masks() -> dict[str, Traced]:
    found = {name: trace(None, made) for name, (kind, made) in GALLERY.items() if kind == "mask"}
    for seed in range(N_RANDOM):
        captured = tables(torch.Generator().manual_seed(seed))
        found[f"random {seed}"] = trace(None, function(seed, "mask", captured).function)
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("tiles")
    parts = [f'#include "{HEADER}"\n']
    for i, traced in enumerate(masks().values()):
        initializer = captured_initializer(traced.mod)
        parts.append(cpp_source(traced.mod, f"M{i}"))
        sizes = {"seq": SEQ, "B_r": TILES[0], "B_c": TILES[1]}
        parts.append(ONE.format(i=i, name=f"M{i}", captured=initializer, **sizes))
    (folder / "tiles.cpp").write_text("\n".join(parts), encoding="utf-8")
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{include_root()}", "tiles.cpp"]
    done = subprocess.run([*command, "-o", "tiles.so"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(folder / "tiles.so"))


def told(library: ctypes.CDLL, i: int, traced: Traced) -> torch.Tensor:
    rows, columns = SEQ // TILES[0], SEQ // TILES[1]
    out = (ctypes.c_int * (rows * columns))()
    getattr(library, f"tiles_{i}")(*arguments(traced), out)
    return torch.tensor(list(out)).view(rows, columns)


def looked_at(traced: Traced) -> torch.Tensor:
    """What each tile is, element by element, of item 1 and head 1."""
    places, one = torch.arange(SEQ), torch.tensor(1)
    seen = evaluate(traced, "visible", None, one, one, places[:, None], places).expand(SEQ, SEQ)
    of_tiles = seen.unflatten(1, (-1, TILES[1])).unflatten(0, (-1, TILES[0])).transpose(1, 2).flatten(2)
    return torch.where(of_tiles.all(-1), 2, torch.where(of_tiles.any(-1), 1, 0))


def test_bounds_in_cpp_are_never_wrong(library: ctypes.CDLL) -> None:
    decided = 0
    for i, (name, traced) in enumerate(masks().items()):
        found, exact = told(library, i, traced), looked_at(traced)
        wrong = (found != Tile.PARTIAL) & (found != exact)
        assert not wrong.any(), name
        decided += int((found != Tile.PARTIAL).sum())
    assert decided > 300


@pytest.mark.parametrize("name", ["causal", "sliding window", "prefix", "shard of a ring", "no mask"])
def test_affine_masks_need_no_bits(library: ctypes.CDLL, name: str) -> None:
    found = masks()
    traced = found[name]
    assert not needs_bits(traced.mod)
    i = list(found).index(name)
    assert torch.equal(told(library, i, traced), looked_at(traced))
    in_python = tiles(traced.mod, Tiling(SEQ, SEQ, *TILES), traced.numbers)
    assert torch.equal(told(library, i, traced), torch.from_numpy(in_python).long())


def test_what_masks_depend_on() -> None:
    found = masks()
    assert needs_bits(found["documents"].mod)
    assert mask_inputs(found["documents"].mod)[:2] == (False, False)
    assert mask_inputs(found["map of tiles"].mod) == (True, True, (0,), (0,))
    table = torch.arange(9.0)
    both = trace(lambda s, b, h, q, k: s + 2.0 * table[h], lambda b, h, q, k: q - k < 5)
    assert mask_inputs(both.mod).tensors == ()
