"""What is chosen for a grid of problems, before and after a change of selection, defaults or tables.

    python benchmarks/compare_choices.py old.json                   # on the old commit: writes
    python benchmarks/compare_choices.py new.json --before old.json # on the new one: writes and compares

Needs no GPU. Each difference is shown with both reasons, which name the measurements that they rest on.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from flash_helpers.kernel_configs import KNOWN_DEVICES, DType
from flash_helpers.kernels.problem import AttentionProblem, visible_limits
from flash_helpers.results.lookup import TuningResults
from flash_helpers.select.errors import NoKernelError
from flash_helpers.select.select import select

WIDTH = 2048  # heads times head size
LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = (1024, 4096, 16384, 65536, 262144)
FEATURES = (
    {"softcap": True}, {"sinks": True}, {"left": 500, "right": 0}, {"varlen": True},
    {"varlen": True, "right": 0}, {"right": 0}, {},
)  # fmt: skip

Chosen = tuple[str, int, str]
"""(short form or error, parts of the keys, reason)."""


def problems() -> Iterator[AttentionProblem]:
    """The cells of the benchmarks and others like them, one-token decoding, features and odd head sizes."""
    for dtype, d, causal, length, tokens, lse in itertools.product(
        DType, (64, 96, 128, 192, 256), (False, True), LENGTHS, TOKENS, (False, True)
    ):
        batch, heads = max(1, tokens // length), WIDTH // d
        limits = visible_limits(causal, (None, None), length, length)
        yield AttentionProblem(dtype, batch, length, length, heads, heads, d, d, *limits, lse=lse)
    for dtype, d, batch, keys, (heads, heads_kv), kind in itertools.product(
        DType,
        (64, 128, 256),
        (1, 8, 32, 128),
        (512, 1024, 4096, 16384, 131072),
        ((32, 8), (16, 16)),
        ({}, {"varlen": True, "cached": True}, {"varlen": True, "cached": True, "paged": True}),
    ):
        yield AttentionProblem(dtype, batch, 1, keys, heads, heads_kv, d, d, **kind)
    for d, length, features in itertools.product((40, 64, 80, 128, 200, 256), (300, 2000, 9000), FEATURES):
        yield AttentionProblem(DType.BF16, 3, length, length, 12, 4, d, d, **features)


def choices() -> dict[str, Chosen]:
    """What is chosen on every known GPU, by the shipped tables and without them."""
    found: dict[str, Chosen] = {}
    for results in (TuningResults(shipped_only=True), None):
        for (name, facts), problem in itertools.product(KNOWN_DEVICES.items(), problems()):
            lse = " lse" if problem.lse else ""
            label = f"{name}, {'tables' if results else 'defaults'}: {problem.label()}{lse}"
            if problem.cached:
                label += " cached"
            try:
                choice = select(problem, facts, results, explained=False)
                found[label] = (choice.kernel.short_form(), choice.n_splits, choice.reason)
            except NoKernelError as error:
                found[label] = ("no kernel", 0, str(error))
    return found


def differences(before: dict[str, Chosen], after: dict[str, Chosen]) -> Iterator[str]:
    """A text for each problem of both for which another kernel, or another number of parts, is chosen."""
    for label in before.keys() & after.keys():
        old, new = before[label], after[label]
        if tuple(old[:2]) != tuple(new[:2]):
            shown = (
                f"  {sign} {one[0]}, parts: {one[1]}\n    {one[2]}" for sign, one in (("-", old), ("+", new))
            )
            yield "\n".join((label, *shown))


def main() -> None:
    """Writes the choices of this commit; with ``--before`` prints what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, help="is written")
    parser.add_argument("--before", type=Path, help="a file that another commit has written")
    arguments = parser.parse_args()
    after = choices()
    arguments.file.write_text(json.dumps(after, indent=0) + "\n", encoding="utf-8")
    if arguments.before is not None:
        texts = sorted(differences(json.loads(arguments.before.read_text(encoding="utf-8")), after))
        print("\n".join(texts))
        print(f"{len(after)} choices, {len(texts)} differ")


if __name__ == "__main__":
    main()
