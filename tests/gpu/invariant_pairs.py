"""Random pairs of calls on a GPU whose bits must be equal, by one family: run as a script, which prints JSON.

    python tests/gpu/invariant_pairs.py FAMILY PAIRS [SECONDS [PROCESSES]]

PROCESSES share the pairs, since a call of a few rows takes the host longer than the GPU. First each names the
kernels that its share needs, by the same draws without a computation; then all kernels are built together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
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
PER_TURN = 8
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


PLACES = 1000  # seeds of one process are so far from the next one's; at most so many kinds of scenes


class _Nothing:
    """A backend that computes nothing."""

    def run(self, call: Any, choice: Any) -> Ran:
        return Ran(None)


def draws(family: str, n: int, place: int = 0) -> Iterator[tuple[int, Limits, int]]:
    """(seed, limits, pairs) of each kind of scene, for the process at a place."""
    for kind, (limits, share) in enumerate(DRAWS[family]):
        yield kind + PLACES * place, limits, round(n * share)


def _empty(*shape: int, generator: Any, device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, device=device, dtype=dtype)


def kernels_of(family: str, n: int, place: int = 0) -> list[Kernel]:
    """The kernels that the ``n`` pairs of one process need. Nobody reads the tensors' numbers."""
    torch.set_num_threads(1)  # of several processes
    facts, known = device_facts_of(), {}

    def choose(problem: Any, device: Any, config: Any) -> None:
        if problem not in known:
            known[problem] = chooser("cuda").choice_for(problem, facts, "", None, explained=False).kernel

    with (
        only(family),
        mock.patch.object(passes, "choose", choose),
        mock.patch.object(passes, "backend", return_value=_Nothing()),
        mock.patch.object(invariance, "differing_rows", return_value=0),
        mock.patch.object(torch, "randn", _empty),
    ):
        for seed, limits, pairs in draws(family, n, place):
            for _ in itertools.islice(pairs_of(seed, "cpu", limits), pairs):
                pass
    return list(dict.fromkeys(known.values()))


def pairs(family: str, n: int, place: int) -> Iterator[Pair]:
    """The pairs of one process, computed on the GPU: some of each kind in turn, should time be short."""
    kinds = [
        itertools.islice(pairs_of(seed, "cuda", limits), count)
        for seed, limits, count in draws(family, n, place)
    ]
    while kinds:
        for kind in list(kinds):
            some = list(itertools.islice(kind, PER_TURN))
            yield from some
            if not some:
                kinds.remove(kind)


def compared(family: str, n: int, seconds: float, place: int) -> dict[str, Any]:
    """What came of the ``n`` pairs of one process, or of as many as ``seconds`` allow."""
    done, rows, differing = 0, 0, []
    begin = time.perf_counter()
    with only(family):
        for pair in pairs(family, n, place):
            done, rows = done + 1, rows + pair.rows
            if pair.differing:
                differing.append(f"{pair.differing} rows of {pair.text}")
            if time.perf_counter() - begin > seconds:
                break
    return {"pairs": done, "rows": rows, "differing": differing, "seconds": time.perf_counter() - begin}


def main(family: str, n: int, seconds: float = 1e9, processes: int = 1) -> None:
    """Prints what came of ``n`` pairs, or of as many as ``seconds`` allow."""
    share, places = n // processes, range(processes)
    begin = time.perf_counter()
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        named = [pool.submit(kernels_of, family, share, place) for place in places]
        kernels = list(dict.fromkeys(kernel for one in named for kernel in one.result()))
        told: dict[str, Any] = {"family": family, "kernels": len(kernels), "processes": processes}
        told["naming_seconds"] = time.perf_counter() - begin
        with only(family):
            build.build_kernels(kernels, [device_facts_of().target])
        told["ready_seconds"] = time.perf_counter() - begin
        print(json.dumps(told), file=sys.stderr, flush=True)
        shares = [pool.submit(compared, family, share, seconds, place) for place in places]
        found = [share.result() for share in shares]
    told |= {name: sum(share[name] for share in found) for name in ("pairs", "rows")}
    told["seconds"] = max(share["seconds"] for share in found)
    differing = [text for share in found for text in share["differing"]]
    print(json.dumps({**told, "differing": len(differing), "first": differing[:20]}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:4]), *map(int, sys.argv[4:5]))
