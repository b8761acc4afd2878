"""Runs attention-gym's masks and score functions, unmodified, and compares with PyTorch in float64.

    python tests/compat/run_attention_gym.py FOLDER [--device cuda] [--gradients] [--output FILE]

FOLDER is a checkout of attention-gym. Each function goes to ``flash_attention.attention`` as it is, and to
PyTorch's uncompiled ``flex_attention`` on float64 copies of the same 16-bit tensors. With ``--gradients``,
gradients of q, k, v and of captured tensors of real numbers are compared, too: those of PyTorch's are made by
autograd through the function, called by ``torch.vmap``, since its own has none on the CPU.

The exit status is 1 where a result differs, or where more than two functions are refused.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from asked_problems import build_all
from attention_gym_cases import BATCH, HEADS, SEQ, Case, cases
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flash_attention
from flash_attention.errors import ModError, NoKernelError

MOST_REFUSED = 2
ERROR, GRADIENT_ERROR = 2e-2, 4e-2  # of bfloat16, relative to the largest number of the tensor


class Row(NamedTuple):
    """What one function gave.

    Attributes:
        name: the function.
        outcome: ``equal``, ``differs`` or ``refused``.
        worst: the largest error, relative to the largest number of its tensor, and of which tensor.
        message: why it was refused.
        seconds: of the library's own call.
    """

    name: str
    outcome: str
    worst: str = ""
    message: str = ""
    seconds: float = 0.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a checkout of attention-gym")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--d-head", type=int, default=64)
    parser.add_argument("--gradients", action="store_true", help="compare gradients, too")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if options.device == "cuda":
        start = time.perf_counter()
        trouble = build_all(calls(options), options.device)
        print(f"kernels are built, {time.perf_counter() - start:.0f} s {trouble}", flush=True)
    rows = []
    for case in cases(options.folder, options.device):
        rows.append(row := run(case, options.device, options.d_head, options.gradients))
        print(f"{row.outcome:8} {row.name:42} {row.worst}{row.message[:110]}", flush=True)
    count = {
        outcome: sum(row.outcome == outcome for row in rows) for outcome in ("equal", "differs", "refused")
    }
    print(", ".join(f"{n} {outcome}" for outcome, n in count.items()) + f", of {len(rows)}")
    if options.output is not None:
        facts = {
            "torch": torch.__version__,
            "device": options.device,
            "gradients": options.gradients,
            **count,
        }
        if options.device == "cuda":
            facts["card"] = torch.cuda.get_device_name()
        options.output.write_text(json.dumps({**facts, "rows": [row._asdict() for row in rows]}, indent=1))
    return int(count["differs"] > 0 or count["refused"] > MOST_REFUSED)


def calls(options: argparse.Namespace) -> Iterator[Callable[[], object]]:
    """The library's calls, to be built ahead."""
    for case in cases(options.folder, options.device):
        q, k, v, _ = (x.requires_grad_(options.gradients) for x in inputs(options.device, options.d_head))
        for x in case.learnt:
            x.requires_grad_(options.gradients)
        yield partial(flash_attention.attention, q, k, v, return_lse=True, **{case.kind: case.make()})


def run(case: Case, device: str, d_head: int, gradients: bool) -> Row:
    """Compares one function."""
    q, k, v, dout = inputs(device, d_head)
    for x in (q, k, v):
        x.requires_grad_(gradients)
    for x in case.learnt:
        x.requires_grad_(gradients)
    learnt = case.learnt if gradients else ()
    function = case.make()
    start = time.perf_counter()
    try:
        out, lse = flash_attention.attention(q, k, v, return_lse=True, **{case.kind: function})
        found = {"out": out, "lse": lse}
        if gradients:
            made = torch.autograd.grad(out, (q, k, v, *learnt), dout, allow_unused=True)
            found |= dict(
                zip(["dq", "dk", "dv", *(f"captured {i}" for i in range(len(learnt)))], made, strict=True)
            )
    except (ModError, NoKernelError, NotImplementedError) as error:
        return Row(case.name, "refused", message=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    expected = by_pytorch(case.kind, function, q, k, v, dout, learnt, gradients)
    errors = {key: largest_error(found[key], expected[key]) for key in found}
    worst = max(errors, key=lambda key: errors[key] / (ERROR if key in ("out", "lse") else GRADIENT_ERROR))
    right = all(errors[key] <= (ERROR if key in ("out", "lse") else GRADIENT_ERROR) for key in errors)
    return Row(case.name, "equal" if right else "differs", f"{errors[worst]:.1e} of {worst}", "", seconds)


def inputs(device: str, d_head: int) -> list[Tensor]:
    """q, k, v and the gradient of the output, (batch, seq, heads, d)."""
    rng = torch.Generator("cpu").manual_seed(6)
    return [torch.randn(BATCH, SEQ, HEADS, d_head, generator=rng).bfloat16().to(device) for _ in range(4)]


def largest_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number; of infinities that differ infinite."""
    found, expected = found.double(), expected.double()
    same = (found == expected) | (found.isnan() & expected.isnan())
    largest = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0
    return float(
        ((found - expected).abs() / max(largest, 1e-3)).masked_fill(same, 0.0).nan_to_num(math.inf).max()
    )


def by_pytorch(
    kind: str,
    function: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    learnt: tuple[Tensor, ...],
    gradients: bool,
) -> dict[str, Tensor]:
    """The same in float64. A query that sees no key has 0 and -inf."""
    wide = [x.detach().double().transpose(1, 2).requires_grad_(gradients) for x in (q, k, v)]
    options: dict[str, Any] = {"score_mod": function}
    if kind == "mask_mod":
        sizes = (BATCH, HEADS, SEQ, SEQ)
        options = {"block_mask": create_block_mask(function, *sizes, device=q.device)}
    with torch.no_grad():
        out, lse = flex_attention(*(x.detach() for x in wide), return_lse=True, **options)
    found = {"out": out.transpose(1, 2), "lse": lse}
    if gradients:
        own = through_autograd(kind, function, *wide)
        torch.testing.assert_close(own.detach(), out, rtol=1e-5, atol=1e-6)  # captured numbers are float32
        made = torch.autograd.grad(own, (*wide, *learnt), dout.double().transpose(1, 2))
        found |= {name: x.transpose(1, 2) for name, x in zip(("dq", "dk", "dv"), made, strict=False)}
        found |= {f"captured {i}": x for i, x in enumerate(made[3:])}
    return found


def through_autograd(kind: str, function: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of float64 tensors whose gradients PyTorch's autograd makes."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    places = [torch.arange(n, device=q.device) for n in scores.shape]
    with_score = [(0,) if kind == "score_mod" else ()] * 4
    for axis in (3, 2, 1, 0):  # the innermost first
        index = tuple(0 if i == axis else None for i in range(4))
        function = torch.vmap(function, in_dims=(*with_score[axis], *index))
    if kind == "score_mod":
        scores = function(scores, *places)
    else:
        scores = scores.masked_fill(~function(*places), -math.inf)
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0) @ v


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
