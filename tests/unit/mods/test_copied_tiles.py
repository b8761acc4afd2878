"""Hopper forward kernels to which copies bring tiles of a bias: what their steady loop is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flash_attention
from flash_attention.mods.tracing import trace
from flash_helpers import build
from flash_helpers.build import KernelCache
from flash_helpers.build.main_loop import hot_path, main_loop
from flash_helpers.build.sass import disassemble, find_tool, parse_functions
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.problem import FORWARD, AttentionProblem
from flash_helpers.select.candidates import kernel_for

BIAS = torch.zeros(2, 8, 8, dtype=torch.bfloat16)
SQUARE = 8 * 8  # elements; an ldmatrix reads four squares


@pytest.mark.compile
@pytest.mark.skipif(find_tool("cuobjdump") is None, reason="there is no cuobjdump")
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("d", [64, 128])
def test_the_steady_loop_reads_a_bias_by_ldmatrix(tmp_path: Path, d: int, causal: bool) -> None:
    mod = trace(lambda s, b, h, q, k: s + BIAS[h, q, k], None).mod
    problem = AttentionProblem(DType.BF16, 4, 4096, 4096, 16, 16, d, d, mod=mod, right=0 if causal else None)
    hopper = next(x for x in directions(FORWARD) if x.family.name == "hopper")
    defaults = hopper.defaults(problem, device_facts("H200"))
    assert defaults is not None
    kernel = kernel_for(defaults.whole[0], problem)
    built = build.build_library([kernel], 90, cache=KernelCache(tmp_path))
    assert [compiled.warnings for compiled in built.kernels] == [()]
    functions = parse_functions(disassemble(built.path))
    (body,) = [code for name, code in functions.items() if "forward_streaming_kernel" in name and code]
    loop = hot_path(main_loop(body))
    names = [one.name for one in loop]
    assert names.count("LDSM") * 4 * SQUARE == 16 * kernel.config.B_c  # of a warp's 16 rows
    assert not {"LDG", "LDL", "STL", "SHFL.IDX"} & set(names)
    # Between the wait for the tile and its release nothing else is waited for, and all of it is read.
    of_barriers = [one.opcode for one in loop if one.name in ("SYNCS", "LDSM")]
    first = of_barriers.index("LDSM.16.M88.4")
    last = len(of_barriers) - of_barriers[::-1].index("LDSM.16.M88.4") - 1
    assert last - first + 1 == names.count("LDSM")
    assert "TRYWAIT" in of_barriers[first - 1]
    assert "ARRIVE" in of_barriers[last + 1]
    # Beside it in the unit: the kernel for a bias that lies otherwise.
    assert any("hopper_forward_mod_kernel" in name and code for name, code in functions.items())


@pytest.mark.gpu
@pytest.mark.parametrize(("seq", "keys"), [(1, 8), (64, 128), (129, 136), (300, 777), (333, 1001)])
@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("d", [64, 128])
def test_copied_tiles_are_what_rows_are(d: int, causal: bool, seq: int, keys: int) -> None:
    """The same bits as of a bias that no copy can bring, and what the CPU computes."""
    generator = torch.Generator().manual_seed(seq)
    q, k, v = (
        torch.randn(2, n, heads, d, generator=generator).bfloat16()
        for n, heads in ((seq, 4), (keys, 2), (keys, 2))
    )
    values = torch.randn(4, seq, keys, generator=generator).bfloat16()
    values[:, ::3, ::2] = -torch.inf
    values[:, ::7] = -torch.inf  # queries without a key
    whole = torch.full((4, seq, -(-keys // 8) * 8), torch.nan, dtype=torch.bfloat16, device="cuda")
    aligned = whole[..., :keys].copy_(values)  # NaN behind it is not read
    shifted = torch.zeros(4, seq, keys + 9, dtype=torch.bfloat16, device="cuda")[..., 1 : keys + 1]
    shifted.copy_(values)

    def attend(bias: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        add = lambda s, b, h, q, k: s + bias[h, q, k]  # noqa: E731
        return flash_attention.attention(*given, causal=causal, return_lse=True, score_mod=add)

    on_gpu = [x.cuda() for x in (q, k, v)]
    found = attend(aligned, *on_gpu)
    for x, rows, expected in zip(found, attend(shifted, *on_gpu), attend(values, q, k, v), strict=True):
        assert torch.equal(x, rows)
        torch.testing.assert_close(x.cpu(), expected, rtol=1.6e-2, atol=1.6e-2)
