"""Computes deterministic gradients many times beside other work, and compares their bits: a program of its
own, since kernels that wait for each other could wait for ever.

``python tests/gpu/repeated_gradients.py FAMILY N`` repeats each case N times, with the kernel that the family
has for it where equal bits are wanted. With ``build`` in the place of N it compiles what that needs.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_attention import attention, attention_varlen
from flash_attention.backends.cuda import device_facts_of
from flash_attention.call import Mask, Scores, problem_of
from flash_attention.layouts import DENSE, Layout, Packed
from flash_attention.run.choices import chooser
from flash_helpers import build
from flash_helpers.kernel_configs import BackwardConfig, DeviceFacts
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import BACKWARD, AttentionProblem
from flash_helpers.select.candidates import kernel_for

BUSY = 2048  # rows of the products that the other stream computes
TURNS = 4  # of which one enqueues other work

Gradients = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """What is differentiated.

    Attributes:
        q, k: queries and keys of a batch item; tuples: of each sequence, packed one behind the other.
        batch: items, where no tuple says it.
        heads: query heads and kv heads.
        options: of the call.
    """

    q: int | tuple[int, ...]
    k: int | tuple[int, ...]
    batch: int = 1
    heads: tuple[int, int] = (8, 8)
    options: dict[str, Any] = field(default_factory=dict)


# Short ones, so that blocks of keys of one head run at the same time, and more blocks than SMs.
CASES = {
    "plain": Case(700, 1100, 2, (8, 2)),
    "short, causal": Case(512, 512, 8, (16, 16), {"causal": True}),
    "causal": Case(1000, 1300, 2, (8, 4), {"causal": True}),
    "window": Case(900, 900, 2, (8, 2), {"causal": True, "window": (256, 0)}),
    "packed, causal": Case(
        (700, 1, 0, 600, 65), (700, 90, 33, 600, 65), heads=(8, 2), options={"causal": True}
    ),
}
HEAD_SIZES = (64, 96, 128, 192, 256)


class Call:
    """A case's call: its tensors, which may be on the meta device."""

    def __init__(self, case: Case, d: int, device: str) -> None:
        self.case, self.packed = case, isinstance(case.q, tuple)
        rows_q, rows_k = (sum(n) if isinstance(n, tuple) else n for n in (case.q, case.k))
        generator = None if device == "meta" else torch.Generator(device).manual_seed(d)

        def tensor(rows: int, heads: int) -> Tensor:
            shape = (rows, heads, d) if self.packed else (case.batch, rows, heads, d)
            return torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16)

        sizes = ((rows_q, case.heads[0]), (rows_k, case.heads[1]), (rows_k, case.heads[1]))
        self.leaves = [tensor(*size).requires_grad_() for size in sizes]
        self.dout = tensor(rows_q, case.heads[0])
        self.layout: Layout = DENSE
        if isinstance(case.q, tuple) and isinstance(case.k, tuple):
            ends = [
                torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device)
                for n in (case.q, case.k)
            ]
            self.layout = Packed(*ends, max(case.q), max(case.k))

    def problem(self) -> AttentionProblem:
        """What the forward pass asks for."""
        causal, window = (
            self.case.options.get("causal", False),
            self.case.options.get("window", (None, None)),
        )
        scores = Scores(self.leaves[0].shape[-1] ** -0.5)
        return problem_of(*self.leaves, Mask.of(causal, window), scores, self.layout, lse=True)

    def gradients(self, config: BackwardConfig) -> Gradients:
        """By this configuration."""
        options = {**self.case.options, "deterministic": True, "backward_config": config}
        if isinstance(self.layout, Packed):
            out = attention_varlen(*self.leaves, *self.layout[:4], **options)
        else:
            out = attention(*self.leaves, **options)
        return torch.autograd.grad(out, self.leaves, self.dout)


def chosen(family: str, facts: DeviceFacts) -> dict[tuple[str, int], tuple[Kernel, Kernel]]:
    """Of each case and head size the kernel of the forward pass, and the family's own of the gradients."""
    found = {}
    direction = next(each for each in directions(BACKWARD) if each.family.name == family)
    for (name, case), d in itertools.product(CASES.items(), HEAD_SIZES):
        problem = Call(case, d, "meta").problem().without_idle_limits()
        answer = direction.defaults(problem.backward(deterministic=True), facts)
        if answer is None:
            continue
        forward = chooser("cuda").choice_for(problem, facts, "cuda:0", None, explained=False).kernel
        found[name, d] = forward, kernel_for(answer.whole[0], problem.backward(deterministic=True))
    return found


def differing(gradients: Callable[[], Gradients], repeats: int) -> int:
    """How many elements of the gradients of so many calls are not those of the first one."""
    expected = gradients()
    assert all(x.isfinite().all() and x.any() for x in expected)
    busy = torch.cuda.Stream()
    a, b = (torch.randn(BUSY, BUSY, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    busy.wait_stream(torch.cuda.current_stream())
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(repeats):
        if i % TURNS == 0:
            with torch.cuda.stream(busy):
                for _ in range(TURNS):
                    torch.mm(a, b)
        for found, first in zip(gradients(), expected, strict=True):
            differ += (found != first).sum()
    return int(differ)


def main(family: str, repeats: str) -> None:
    """Says how many were equal, and which kernel made them.

    Raises:
        SystemExit: two differ.
    """
    facts = device_facts_of("cuda")
    kernels = chosen(family, facts)
    build.build_kernels(list(dict.fromkeys(k for both in kernels.values() for k in both)), [facts.target])
    if repeats == "build":
        return
    for (name, d), (_, kernel) in kernels.items():
        begin = time.perf_counter()
        call = Call(CASES[name], d, "cuda")
        if differ := differing(lambda: call.gradients(kernel.config), int(repeats)):  # noqa: B023
            raise SystemExit(f"{differ} elements of {name} differ: {kernel.short_form()}")
        seconds = time.perf_counter() - begin
        print(f"{repeats} equal: {name}: {kernel.short_form()} ({seconds:.1f} s)", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
