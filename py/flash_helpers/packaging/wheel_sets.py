"""What a wheel brings compiled: named sets of problems, and the kernels that ``select`` picks for them.

A set names problems, never kernels, so that a wheel holds what a call will ask for. Lengths and batches are
on both sides of every limit of the selection: few and many thread blocks, each range of lengths that a
family's table tells apart, fewer and more keys than ``MIN_DECODE_KEYS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, product

from flash_helpers.kernels.device_facts import KNOWN_DEVICES, DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import FORWARD, AttentionProblem
from flash_helpers.results.lookup import TuningResults
from flash_helpers.select.select import select

Sizes = tuple[int, int]
Mask = tuple[int | None, int | None]

DTYPES = (DType.BF16, DType.FP16)
HEAD_SIZES: tuple[Sizes, ...] = ((64, 64), (128, 128), (256, 256))
HEADS = ((32, 32), (32, 8), (8, 1))  # (n_heads, n_heads_kv): one kv head a query head, groups, one for all
BATCHES = (1, 8, 128)
PROMPTS = (128, 256, 512, 1024, 2048, 4096, 8192)
SHORT = 64  # one tile of the smallest kernels
KEYS = (256, 1024, 16384, 131072)
CHUNKS = (2, 64, 256, 1024, 2048, 4096, 8192)
FULL: Mask = (None, None)
CAUSAL: Mask = (None, 0)


@dataclass(frozen=True)
class WheelSet:
    """Problems whose kernels belong in a wheel.

    Attributes:
        name: as ``--sets`` takes it.
        reason: who needs it.
        problems: makes the problems for a GPU generation, 80 for sm_80.
    """

    name: str
    reason: str
    problems: Callable[[int], Iterator[AttentionProblem]]


def _problems(
    queries: Iterable[int],
    keys: Iterable[int] = (),
    *,
    masks: Iterable[Mask] = ((None, None), (None, 0)),
    sizes: Iterable[Sizes] = HEAD_SIZES,
    batches: Iterable[int] = BATCHES,
    packed: bool = False,
    pages: Iterable[bool] | None = None,
) -> Iterator[AttentionProblem]:
    """All combinations, with and without an LSE.

    Args:
        queries: ``seq_len_q``.
        keys: ``seq_len_k``, of which those below ``seq_len_q`` are left out; empty: as many as queries.
        masks: (left, right).
        sizes: (d_head, d_head_v).
        batches: batch items.
        packed: sequences of several lengths.
        pages: keys are a cache, in pages or not; None: they are no cache.
    """
    lengths = [(q, k) for q in queries for k in (tuple(keys) or (q,)) if k >= q]
    for paged, dtype, (d, d_v), (left, right), lse, batch, (n_heads, n_heads_kv), (
        seq_len_q,
        seq_len_k,
    ) in product(pages or (False,), DTYPES, sizes, masks, (False, True), batches, HEADS, lengths):
        yield AttentionProblem(
            dtype=dtype,
            batch=batch,
            seq_len_q=seq_len_q,
            seq_len_k=seq_len_k,
            n_heads=n_heads,
            n_heads_kv=n_heads_kv,
            d_head=d,
            d_head_v=d_v,
            left=left,
            right=right,
            varlen=packed or pages is not None,
            cached=pages is not None,
            paged=paged,
            lse=lse,
        )


def _prompts(target: int) -> Iterator[AttentionProblem]:
    able = [direction for direction in directions(FORWARD) if direction.family.runs_on(target)]
    return _problems(
        (SHORT, *PROMPTS), sizes=sorted({sizes for direction in able for sizes in direction.sizes()})
    )


def _gradients(target: int) -> Iterator[AttentionProblem]:
    """Of prompts, dense and packed: of bits that may differ between runs, and of equal ones."""
    for packed, deterministic in product((False, True), (False, True)):
        for problem in _problems(PROMPTS, packed=packed):
            if not problem.lse:  # which is an input of gradients
                yield problem.backward(deterministic)


SETS = (
    WheelSet(
        "prompts",
        "queries attend to themselves, causally or not: encoders, training's forward pass, prompts",
        _prompts,
    ),
    WheelSet(
        "packed",
        "the same of sequences of different lengths, packed without padding",
        lambda target: _problems(PROMPTS, packed=True),
    ),
    WheelSet(
        "windows",
        "prompts of models with a sliding window",
        lambda target: _problems(PROMPTS, masks=[(256, 0)]),
    ),
    WheelSet(
        "decode",
        "one new token a sequence, over keys as they are and over a cache whose lengths the device knows",
        lambda target: chain(
            _problems((1,), KEYS, masks=[FULL]), _problems((1,), KEYS, masks=[FULL], pages=[False])
        ),
    ),
    WheelSet(
        "paged",
        "one new token a sequence, over a cache in pages",
        lambda target: _problems((1,), KEYS, masks=[FULL], pages=[True]),
    ),
    WheelSet(
        "chunks",
        "several new tokens a sequence behind keys that are there: speculated tokens, prompts in chunks",
        lambda target: chain(
            _problems(CHUNKS, KEYS, masks=[CAUSAL]),
            _problems(CHUNKS, KEYS, masks=[CAUSAL], pages=[False, True]),
        ),
    ),
    WheelSet(
        "training",
        "gradients of prompts and of packed sequences, with equal bits in every run or not",
        _gradients,
    ),
)
"""What ``--sets`` knows, by default all.

Windows over a cache, soft caps, sinks and head sizes between those of the kernels are in none: each doubles
what it is combined with, for few models. Such kernels are compiled on first use.
"""

NAMES = tuple(each.name for each in SETS)


def wheel_kernels(target: int, names: Iterable[str] = NAMES) -> list[Kernel]:
    """The kernels that some sets need on GPUs of one generation, by short form, each once.

    Args:
        target: 80 for sm_80.
        names: of the sets.

    Raises:
        ValueError: no such set, or a generation of which no GPU is described in ``KNOWN_DEVICES``.
    """
    names = list(names)
    if unknown := sorted(set(names) - set(NAMES)):
        raise ValueError(
            f"no set of a wheel's kernels is named {', '.join(map(repr, unknown))}; there are "
            f"{', '.join(NAMES)}"
        )
    chosen = (_kernels(s, gpu) for s in SETS if s.name in names for gpu in devices_of(target))
    return sorted(set(chain.from_iterable(chosen)), key=Kernel.short_form)


def devices_of(target: int) -> list[DeviceFacts]:
    """The GPUs that kernels of a generation are chosen for.

    Raises:
        ValueError: none is known.
    """
    if devices := [facts for facts in KNOWN_DEVICES.values() if facts.target == target]:
        return devices
    known = ", ".join(dict.fromkeys(str(facts.target) for facts in KNOWN_DEVICES.values()))
    raise ValueError(
        f"target {target}: no GPU of this generation is described, so nothing can be chosen for it; there "
        f"are {known}. Name the kernels yourself with --kernels"
    )


@cache
def _kernels(wheel_set: WheelSet, facts: DeviceFacts) -> frozenset[Kernel]:
    """With what the families choose, and with what the shipped table of the GPU puts in its place."""
    shipped = TuningResults(shipped_only=True)
    problems = dict.fromkeys(problem.with_rows_packed() for problem in wheel_set.problems(facts.target))
    return frozenset(
        select(problem, facts, table, explained=False).kernel
        for problem in problems
        for table in (None, shipped)
    )
