"""The mods that kernels of gradients are compiled with, and what becomes of the sums that they gather."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from generated import arguments, captured_initializer
from random_functions import BATCH, HEADS, SEQ, function, grid, tables

from flash_attention.backends.captured_sums import CapturedSums
from flash_attention.mods.gradients import ScoreDerivative
from flash_attention.mods.tracing import Traced, trace
from flash_helpers import build
from flash_helpers.build import KernelCache
from flash_helpers.build.sources import include_root
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.problem import BACKWARD, AttentionProblem
from flash_helpers.mods.backward import backward_mod
from flash_helpers.mods.cpp import HEADER, cpp_source
from flash_helpers.mods.mod import Element, Mod
from flash_helpers.select.candidates import kernel_for

TABLE = torch.randn(4, 20, generator=torch.Generator().manual_seed(1))
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
DOCUMENT = torch.arange(20) // 7


def causal(b, h, q, k):
    return q >= k


def mod_of(score_mod=None, mask_mod=None) -> Mod:
    return trace(score_mod, mask_mod).mod


# ---------------------------------------------------------------------- the mod
def test_a_mask_alone_stays_as_it_is() -> None:
    mod = mod_of(mask_mod=lambda b, h, q, k: DOCUMENT[q] == DOCUMENT[k])
    assert backward_mod(mod) is mod
    assert "kScalesGradients = false" in cpp_source(mod)


def test_a_derivative_of_1_is_left_out() -> None:
    added = backward_mod(mod_of(lambda s, b, h, q, k: s + TABLE[h, k], causal))
    assert [name for name, _ in added.results] == ["score", "visible"]
    scaled = backward_mod(mod_of(lambda s, b, h, q, k: s * SLOPES[h], causal))
    assert {name for name, _ in scaled.results} == {"d_score", "score", "visible"}
    assert "kScalesGradients = true" in cpp_source(scaled)


def test_gathered_tensors_follow_those_of_the_mod() -> None:
    mod = mod_of(lambda s, b, h, q, k: s + TABLE[h, k] * SLOPES[h] + DOCUMENT[k])
    types = [(t.element, t.n_dims) for t in mod.tensors]
    digests = set()
    for wanted in ((), (0,), (1,), (0, 1)):
        made = backward_mod(mod, wanted)
        assert made.gathered == wanted
        sums = [(Element.INT64, mod.tensors[i].n_dims) for i in wanted]
        scales = [(Element.INT32, 1)] if wanted else []
        assert [(t.element, t.n_dims) for t in made.tensors] == types + sums + scales
        digests.add(made.digest)
    assert len(digests) == 4


def test_a_tensor_that_no_score_loads_is_not_gathered() -> None:
    mod = mod_of(lambda s, b, h, q, k: s * 2.0, lambda b, h, q, k: SLOPES[h] > 0.2)
    assert backward_mod(mod, (0,)).gathered == ()
    assert CapturedSums.of(backward_mod(mod, (0,)), (SLOPES,)) is None


def test_problems_with_other_gradients_have_other_kernels() -> None:
    mod = mod_of(lambda s, b, h, q, k: s + TABLE[h, k])
    forward = AttentionProblem(DType.BF16, 1, 64, 64, 4, 4, 64, 64, mod=mod)
    assert forward.compiled_mod is mod
    plain, learnt = forward.backward(), forward.backward(captured_gradients=(0,))
    (first, second) = (kernel_for(directions(BACKWARD)[0].built()[0].config, p) for p in (plain, learnt))
    assert first != second
    assert first.mod == backward_mod(mod)
    assert second.mod == backward_mod(mod, (0,))
    assert first.short_form() != second.short_form()


# ---------------------------------------------------------------------- sums
def test_sums_become_numbers_of_the_tensors_type() -> None:
    captured = (torch.zeros(3), torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(()).requires_grad_())
    mod = backward_mod(
        mod_of(lambda s, b, h, q, k: s + captured[0][h] + captured[1][h, h] * captured[2]), (0, 1, 2)
    )
    sums = CapturedSums.of(mod, captured)
    assert sums is not None
    assert [x.shape for x in sums.tensors()] == [(3,), (2, 2), (), (6,)]
    sums.sums[0].copy_(torch.tensor([2**40, -(2**59), 2**62 + 12345]))
    sums.sums[1].copy_(torch.tensor([[1, 2], [-3, 2**62 - 2**59]]))
    sums.sums[2].fill_(-(2**50) - 1)
    sums.scales[3:] = torch.tensor([50, -100, 150])
    gradients = {i: torch.empty_like(x.detach()) for i, x in enumerate(captured)}
    sums.write(gradients)
    assert gradients[0][:2].tolist() == [2.0**-10, -(2.0**9)]
    assert gradients[1].flatten()[:3].tolist() == [
        2.0**100,
        2.0**101,
        torch.tensor(-3 * 2.0**100).bfloat16().item(),
    ]
    assert gradients[0][2].isnan()
    assert gradients[1][1, 1].isnan()
    assert gradients[2].item() == -(2.0**-100)


# ---------------------------------------------------------------------- generated code
GATHER = """
extern "C" void gather_{i}(const int64_t *whole, const double *real, void *const *data,
                           const int64_t *strides, const int *sizes, const float *score,
                           const float *weight, double *const *out) {{
    using M = M{i};
    const M::Captured captured{{{captured}}};
    const auto once = M::once(captured);
    for (int b = 0; b < {batch}; ++b) for (int h = 0; h < {heads}; ++h) {{
        const auto head = M::head(captured, once, b, h);
        for (int q = 0; q < {seq}; ++q) for (int k = 0; k < {seq}; ++k) {{
            const auto row = M::row(captured, once, head, b, h, q);
            const auto column = M::column(captured, once, head, b, h, k);
            const int at = ((b * {heads} + h) * {seq} + q) * {seq} + k;
            M::gradients(captured, once, head, row, column, score[at], b, h, q, k,
                         [&](auto load, auto tensor, const auto &sums, float slope, auto... indices) {{
                static_assert(load.number < M::kLoads && tensor.number < M::kGathered);
                const int64_t place = sums.place(indices...);
                if (place >= 0) out[tensor.number][place] += double(slope * weight[at]);
            }});
        }}
    }}
}}
"""


def learnt_functions(n: int) -> list[tuple[str, Traced, tuple[int, ...]]]:
    captured = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in
                tables(torch.Generator().manual_seed(0)).items()}  # fmt: skip
    found = []
    for seed in range(n):
        made = function(seed, "score", captured, smooth=True)
        traced = trace(made.function)
        learnt = tuple(i for i, t in enumerate(traced.tensors) if t.requires_grad)
        mod = backward_mod(traced.mod, learnt)
        if mod.gathered:
            found.append((made.text, traced, mod.gathered))
    return found


@pytest.mark.compile
def test_what_is_gathered_is_the_gradient(tmp_path: Path) -> None:
    cases = learnt_functions(160)
    assert len(cases) > 60
    mods = [backward_mod(traced.mod, learnt) for _, traced, learnt in cases]
    parts = [f'#include "{HEADER}"\n']
    for i, mod in enumerate(mods):
        sizes = {"batch": BATCH, "heads": HEADS, "seq": SEQ}
        parts += [cpp_source(mod, f"M{i}"), GATHER.format(i=i, captured=captured_initializer(mod), **sizes)]
    (tmp_path / "gather.cpp").write_text("\n".join(parts), encoding="utf-8")
    found = shutil.which("g++") or shutil.which("clang++")
    assert found, "no C++ compiler found: install g++"
    command = [
        found,
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        f"-I{include_root()}",
        "gather.cpp",
        "-o",
        "gather.so",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "gather.so"))
    score, *indices = grid(torch.Generator().manual_seed(1), torch.float32)
    weight = torch.randn(score.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    score = score.float().contiguous()
    for i, ((text, traced, learnt), mod) in enumerate(zip(cases, mods, strict=True)):
        sums = CapturedSums.of(mod, traced.tensors)
        assert sums is not None
        given = arguments(Traced(mod, traced.numbers, (*traced.tensors, *sums.tensors())))
        totals = [torch.zeros(traced.tensors[slot].shape, dtype=torch.float64) for slot in learnt]
        out = (ctypes.c_void_p * len(totals))(*(x.data_ptr() for x in totals))
        getattr(library, f"gather_{i}")(
            *given, *(ctypes.c_void_p(x.data_ptr()) for x in (score, weight)), out
        )
        expected = {slot: torch.zeros(traced.tensors[slot].shape, dtype=torch.float64) for slot in learnt}
        derivative = ScoreDerivative.of(traced, learnt)
        assert derivative is not None
        derivative.add(expected, weight, score, tuple(indices))
        for total, slot in zip(totals, learnt, strict=True):
            scale = max(1.0, expected[slot].abs().max().item())
            torch.testing.assert_close(
                total, expected[slot], rtol=1e-4, atol=1e-5 * scale, msg=lambda m, t=text: f"{t}\n{m}"
            )


KINDS = {
    "causal": (None, causal),
    "documents": (None, lambda b, h, q, k: (DOCUMENT[q] == DOCUMENT[k]) & (q >= k)),
    "ALiBi": (lambda s, b, h, q, k: s + SLOPES[h] * (k - q), None),
    "soft cap": (lambda s, b, h, q, k: 20.0 * torch.tanh(s / 20.0), causal),
    "by distance": (lambda s, b, h, q, k: s + TABLE[h, q - k + 10], None),
}
MOST_SPILLED = {"ampere": 128, "hopper": 192}  # bytes a thread


@pytest.mark.compile
@pytest.mark.parametrize(("family", "device", "target"), [("ampere", "A100", 80), ("hopper", "H100", 90)])
@pytest.mark.parametrize("name", KINDS)
def test_kernels_compile_without_warnings(
    tmp_path: Path, family: str, device: str, target: int, name: str
) -> None:
    traced = trace(*KINDS[name])
    learnt = tuple(i for i, t in enumerate(traced.tensors) if t.is_floating_point())
    problem = AttentionProblem(DType.BF16, 2, 4096, 4096, 16, 16, 64, 64, mod=traced.mod).backward(
        False, learnt
    )
    direction = next(d for d in directions(BACKWARD) if d.family.name == family)
    defaults = direction.defaults(problem, device_facts(device))
    assert defaults is not None
    kernel = kernel_for(defaults.whole[0], problem)
    (built,) = build.build_library([kernel], target, cache=KernelCache(tmp_path)).kernels
    assert not built.warnings  # C75xx: products that wait for each other
    assert built.spill_bytes <= MOST_SPILLED[family]


@pytest.mark.compile
def test_kernels_of_one_library_load_and_launch_their_own_gathering(tmp_path: Path) -> None:
    """What is shared by name would set the attributes of one kernel's stub, and launch another's."""
    traced = trace(*KINDS["ALiBi"])
    learnt = tuple(i for i, t in enumerate(traced.tensors) if t.is_floating_point())
    plain = AttentionProblem(DType.BF16, 2, 4096, 4096, 16, 16, 64, 64, mod=traced.mod)
    direction = next(d for d in directions(BACKWARD) if d.family.name == "ampere")
    kernels = []
    for deterministic in (False, True):
        problem = plain.backward(deterministic, learnt)
        defaults = direction.defaults(problem, device_facts("A100"))
        assert defaults is not None
        kernels.append(kernel_for(defaults.whole[0], problem))
    assert kernels[0] != kernels[1]
    path = build.build_library(kernels, 80, cache=KernelCache(tmp_path)).path
    shown = subprocess.run(["nm", "-C", str(path)], capture_output=True, text=True, check=True).stdout
    assert "flash_attention_kernel_library" in shown  # symbols are there
    for name in ("load_captured_gradients<", "launch_captured_gradients<"):
        assert sum(name in line for line in shown.splitlines()) in (0, len(kernels)), (
            name
        )  # 0: a part of its caller
