"""Random pairs of calls on a GPU whose bits must be equal, by one family: run as a script, which prints JSON.

    python tests/gpu/invariant_pairs.py FAMILY PAIRS [SECONDS]

The kernels that the pairs need are named first, by the same draws without a computation, and built together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from flash_attention.backends.cuda import device_facts_of
from flash_attention.call import Ran
from flash_attention.run import passes
from flash_attention.run.choices import chooser
from flash_helpers import build
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.test import invariance
from flash_helpers.test.invariance import Limits, Pair, pairs_of

CAUSAL, FULL, WINDOW = (True, (None, None)), (False, (None, None)), (True, (300, None))
D128, D64, D256 = ((128, 128),), ((64, 64),), ((256, 256),)
FEATURES = Limits(D128, 2000, (CAUSAL,), (20.0,), (True,), (torch.float16,))
DRAWS = {  # family: what scenes are drawn from, with the share of the pairs
    "hopper": (
        (Limits(D128, 6000, (CAUSAL, CAUSAL, FULL)), 0.6),
        (Limits(D128, 3000, (WINDOW,)), 0.1),
        (Limits(D64, 4000, (CAUSAL,)), 0.1),
        (Limits(D256, 3000, (CAUSAL,)), 0.1),
        (FEATURES, 0.1),
    ),
    "ampere": (
        (Limits(D128, 3000, (CAUSAL,)), 0.7),
        (Limits(D64, 3000, (WINDOW,)), 0.15),
        (FEATURES, 0.15),
    ),
}


@contextlib.contextmanager
def only(family: str) -> Iterator[None]:
    """Lets one family answer for invariant problems, whatever the GPU."""
    with contextlib.ExitStack() as stack:
        for direction in directions("forward"):
            if direction.family.name != family:
                usual = direction.defaults
                other = {"defaults": lambda p, f, usual=usual: None if p.invariant else usual(p, f)}
                stack.enter_context(mock.patch.dict(direction.__dict__, other))
        yield


class _Nothing:
    """A backend that computes nothing."""

    def run(self, call: Any, choice: Any) -> Ran:
        return Ran(None)


def draws(family: str, n: int) -> Iterator[tuple[int, Limits, int]]:
    """(seed, limits, pairs) of each kind of scene."""
    for seed, (limits, share) in enumerate(DRAWS[family]):
        yield seed, limits, round(n * share)


def kernels_of(family: str, n: int) -> list[Kernel]:
    """The kernels that the pairs need, the most wanted first."""
    facts, found, known = device_facts_of(), {}, {}

    def choose(problem: Any, device: Any, config: Any) -> None:
        if problem not in known:
            known[problem] = chooser("cuda").choice_for(problem, facts, "", None, explained=False).kernel
        found[known[problem]] = found.get(known[problem], 0) + 1

    with (
        mock.patch.object(passes, "choose", choose),
        mock.patch.object(passes, "backend", return_value=_Nothing()),
        mock.patch.object(invariance, "differing_rows", return_value=0),
    ):
        for seed, limits, pairs in draws(family, n):
            for _ in itertools.islice(pairs_of(seed, "cpu", limits), pairs):
                pass
    return sorted(found, key=lambda kernel: -found[kernel])


def pairs(family: str, n: int) -> Iterator[Pair]:
    """The pairs, computed on the GPU."""
    for seed, limits, count in draws(family, n):
        yield from itertools.islice(pairs_of(seed, "cuda", limits), count)


def main(family: str, n: int, seconds: float) -> None:
    """Prints what came of ``n`` pairs, or of as many as ``seconds`` allow."""
    with only(family):
        kernels = kernels_of(family, n)
        build.build_kernels(kernels, [device_facts_of().target])
        begin, done, rows, differing = time.perf_counter(), 0, 0, []
        for pair in pairs(family, n):
            done, rows = done + 1, rows + pair.rows
            if pair.differing:
                differing.append(f"{pair.differing} rows of {pair.text}")
            if time.perf_counter() - begin > seconds:
                break
        took = time.perf_counter() - begin
    told = {"family": family, "pairs": done, "rows": rows, "kernels": len(kernels), "seconds": took}
    print(json.dumps({**told, "differing": len(differing), "first": differing[:20]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 1e9)
