"""Walks all architectures, or those named, and prints what comes of each and the totals.

PYTHONPATH=.:py:tests/integrations python -m transformers_walk [model types] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import signal
import sys
import time
import warnings
from typing import Any

import transformers

from transformers_walk.compare import BROKEN, DIFFERENT, NOT_SMALL, Finding, walk
from transformers_walk.small import model_types

SECONDS = 120  # for one architecture


class TooSlowError(BaseException):
    pass


def _stop(*_: Any) -> None:
    raise TooSlowError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json")
    parser.add_argument("--part", default="0/1", help="i/n: the i-th of n parts")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _stop)
    part, n_parts = map(int, arguments.part.split("/"))
    findings: list[Finding] = []
    for model_type in arguments.model_types or model_types()[part::n_parts]:
        begin = time.perf_counter()
        signal.alarm(SECONDS)
        try:
            found = list(walk(model_type, arguments.device))
        except TooSlowError:
            found = [Finding(model_type, None, NOT_SMALL, f"takes more than {SECONDS} s")]
        finally:
            signal.alarm(0)
        findings += found
        for finding in found:
            padding = finding.padding or "-"
            print(f"{model_type:28} {padding:6} {finding.kind:24} {finding.why[:160]}", flush=True)
        print(f"    {time.perf_counter() - begin:.1f} s", file=sys.stderr)
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump([dataclasses.asdict(finding) for finding in findings], file, indent=0)
    print(f"\nTransformers {transformers.__version__}, {arguments.device}: findings, architectures")
    for kind, count in collections.Counter(finding.kind for finding in findings).most_common():
        types = {finding.model_type for finding in findings if finding.kind == kind}
        print(f"{count:5} {len(types):5}  {kind}")
    return int(any(finding.kind in (DIFFERENT, BROKEN) for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
