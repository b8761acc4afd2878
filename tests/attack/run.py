"""Attacks on the library: ``python tests/attack/run.py --kills 39 --corruptions 1400 --calls 40000``.

Prints what was tried and what went wrong; the exit status is 1 if anything did.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "py"), str(Path(__file__).resolve().parents[2])]

from corruptions import corruptions  # noqa: E402
from kills import kills  # noqa: E402
from outcome import Outcome, table  # noqa: E402


def attack(n_kills: int, n_corruptions: int, n_calls: int, seed: int) -> list[Outcome]:
    """All three kinds; of the calls 5 of 8 are valid."""
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # kernels of a private folder that is there already would be found
        # Kills come first: they fork, which they may only before torch starts threads.
        outcomes.append(kills(Path(folder) / "kills", n_kills, seed))
        outcomes.append(corruptions(Path(folder) / "corruptions", n_corruptions, seed))
    tempfile.tempdir = None
    if n_calls:
        from calls import invalid_calls, valid_calls

        outcomes += [valid_calls(n_calls * 5 // 8, seed), invalid_calls(n_calls - n_calls * 5 // 8, seed)]
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=13, help="of each kind of work (default: 13)")
    parser.add_argument("--corruptions", type=int, default=1400, help="damaged files (default: 1400)")
    parser.add_argument("--calls", type=int, default=40_000, help="valid and invalid calls (default: 40000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the outcome to this file")
    options = parser.parse_args()
    begin = time.perf_counter()
    outcomes = attack(options.kills, options.corruptions, options.calls, options.seed)
    print(table(outcomes))
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    for failure in failures[:50]:
        print(failure)
    print(f"{len(failures)} failures in {time.perf_counter() - begin:.0f} s, seed {options.seed}")
    if options.json:
        options.json.write_text(json.dumps([outcome.to_json() for outcome in outcomes], indent=1) + "\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
