"""The kernels that ``benchmarks/mods.py`` measures, of the library's choice or a family's, built ahead."""

from __future__ import annotations

import torch
from mod_cases import Case, Mods, Size
from torch import Tensor

import flash_attention
from flash_attention.backends.cuda_kernels import build_at_once, device_facts_of
from flash_attention.call import Mask, Scores, problem_of
from flash_attention.layouts import DENSE, Packed
from flash_attention.mods import trace
from flash_attention.run.plain_forms import mask_and_scores
from flash_helpers.kernels.families import family_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.family_choices import family_choices

Cell = tuple[Case, Size]


def row_offsets(ends: Tensor, batch: int, seq_len: int, device: torch.device) -> tuple[Tensor, int]:
    """Where documents begin and end among the rows of all items, int32, and the longest."""
    starts = seq_len * torch.arange(batch)[:, None] + ends[:-1]
    offsets = torch.cat((starts.flatten(), torch.tensor([batch * seq_len]))).int().to(device)
    return offsets, int(ends.diff().max())


def problems(cell: Cell, device: torch.device, lse: bool) -> dict[str, AttentionProblem]:
    """Of this library's contestants, by name, as calls ask for them."""
    case, size = cell
    shape = (size.batch, size.seq_len, size.n_heads, size.d_head)
    x = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    made = trace(**case.mods(size, device), device=device)
    said = mask_and_scores(Mask(), Scores(1.0, traced=made), DENSE, size.seq_len, size.seq_len)
    twin = {} if case.twin is None else dict(case.twin(size))
    if (ends := twin.pop("documents", None)) is not None:
        rows, (offsets, longest) = x.flatten(0, 1), row_offsets(ends, size.batch, size.seq_len, x.device)
        packed = problem_of(rows, rows, rows, layout=Packed(offsets, offsets, longest, longest), lse=lse)
    else:
        mask = Mask.of(twin.pop("causal", False), twin.pop("window", (None, None)))
        packed = problem_of(x, x, x, mask, Scores(1.0, **twin), lse=lse)
    return {
        "mod": problem_of(x, x, x, *said, lse=lse),
        "twin": packed,
        "plain": problem_of(x, x, x, lse=lse),
    }


def insisted(cell: Cell, device: torch.device, backward: bool, family: str) -> dict[str, Mods]:
    """The keywords by which calls of contestants run a family's defaults; of no family none."""
    if not family:
        return {}
    found: dict[str, Mods] = {}
    for name, problem in problems(cell, device, backward).items():
        found[name] = {"config": _default(problem, device, family).config}
        if backward:
            found[name]["backward_config"] = _default(problem.backward(), device, family).config
    return found


def _default(problem: AttentionProblem, device: torch.device, family: str) -> Kernel:
    """What a family's table of defaults says of a problem, for whole rows."""
    choices = family_choices(problem, device_facts_of(device))
    return next(c.kernel for c in choices if c.n_splits == 1 and family_of(c.kernel).name == family)


def build(cells: list[Cell], device: torch.device, backward: bool, family: str) -> str:
    """Builds what all cells need, in parallel; what cannot be had is said, and shows in the rows."""
    wanted = [p for cell in cells for p in problems(cell, device, backward).values()]
    wanted = list(dict.fromkeys([*wanted, *(p.backward() for p in wanted)] if backward else wanted))
    try:
        if family:
            build_at_once((_default(problem, device, family) for problem in wanted), device)
        else:
            flash_attention.prepare(wanted, device)
    except Exception as error:  # one of many; the calls build the others, and say their own
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""
