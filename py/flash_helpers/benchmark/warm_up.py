"""Has contestants that compile at their first use compile ahead, in processes beside each other.

FlashAttention-4 compiles for seconds for each kind of problem, one after the other in one process. It can
keep what it compiled in a folder, from which the measuring process takes it. Contestants without such a
folder gain nothing here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flash_helpers.benchmark.cases import Case
from flash_helpers.benchmark.contestants import CONTESTANTS
from flash_helpers.benchmark.result_file import FORWARD
from flash_helpers.console.alone import run_alone

KEEPS_COMPILED = {
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "{folder}",
}
"""Settings of FlashAttention-4, which it reads when it is imported."""


def keep_compiled(folder: Path) -> dict[str, str]:
    """Makes this process and those that it starts keep what contestants compile in ``folder``.

    A folder that the caller's environment names stays.
    """
    settings = {name: value.format(folder=folder) for name, value in KEEPS_COMPILED.items()}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    return settings


def warm_up(cases: Sequence[Case], name: str, folder: Path, jobs: int, seconds: float) -> float:
    """Calls a contestant once on each case, the cases spread over processes; those of a kind are in one.

    Args:
        cases: that will be measured.
        name: of the contestant.
        folder: where it keeps what it compiles.
        jobs: processes.
        seconds: processes that take longer are ended; what they had compiled is kept.

    Returns:
        Seconds that it took.
    """
    begin = time.monotonic()
    keep_compiled(folder)
    listed = folder / "cases.json"
    alike = sorted(cases, key=_kind)
    listed.write_text(json.dumps([[case.feature, case.to_json(), case.direction] for case in alike]))
    module = "flash_helpers.benchmark.warm_up"
    command = [sys.executable, "-m", module, "--name", name, "--cases", str(listed)]
    processes = min(jobs, len(cases))
    running = [
        subprocess.Popen(
            [*command, "--part", str(part), "--parts", str(processes)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for part in range(processes)
    ]
    for process in running:
        try:
            process.wait(max(0.0, seconds - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return time.monotonic() - begin


def _kind(case: Case) -> str:
    """The same for cases that a contestant may well compute by one kernel."""
    sizes = (case.d_head, case.value_size, case.heads // case.heads_kv, case.seq_q == 1, bool(case.lengths))
    return repr(
        (
            case.direction == FORWARD,
            case.dtype.name,
            sizes,
            case.causal,
            case.limits,
            case.softcap,
            case.sinks,
        )
    )


def read_cases(listed: Path) -> list[Case]:
    """The cases that ``warm_up`` wrote down."""
    return [Case.from_json(*one) for one in json.loads(listed.read_text())]


def run(cases: Sequence[Case], name: str) -> int:
    """Calls a contestant once on each case; returns on how many it did not raise."""
    import torch

    from flash_helpers.benchmark.cases import make_inputs

    contestant = next(c for c in CONTESTANTS if c.name == name)
    done = 0
    for case in cases:
        try:
            prepared = contestant.prepare(case, make_inputs(case, torch.device("cuda")))
            with prepared.context():
                prepared.call()
            done += 1
        except Exception as error:  # the measuring process says why it has no time
            print(f"{case.label()}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
    return done


def main(
    name: Annotated[str, typer.Option(help="contestant")],
    cases: Annotated[Path, typer.Option(help="file of cases: feature, problem and direction of each")],
    part: Annotated[int, typer.Option(min=0, help="which part of the cases, from 0 on")] = 0,
    parts: Annotated[int, typer.Option(min=1, help="into how many parts they are cut")] = 1,
) -> None:
    """One process's part of warming up."""
    found = read_cases(cases)
    begin, end = (len(found) * n // parts for n in (part, part + 1))
    run(found[begin:end], name)


if __name__ == "__main__":
    run_alone(main)
