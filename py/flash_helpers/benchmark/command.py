"""What ``flash-attention bench`` and ``tools/benchmark/run_kernels.py`` do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from flash_helpers.benchmark.implementations import AttentionImplementation, Implementation
from flash_helpers.benchmark.peers import select_peers
from flash_helpers.benchmark.plan import DEFAULT_MODES, Plan
from flash_helpers.benchmark.results import Results, Row
from flash_helpers.benchmark.runner import bench, named_device
from flash_helpers.benchmark.table import results_table
from flash_helpers.commands.output import STDOUT, console_for, write_json
from flash_helpers.commands.progress import shown_progress
from flash_helpers.commands.writable import check_file
from flash_helpers.kernel_selection import CAUSAL, select_configs
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.problem import Problem, grid
from flash_helpers.results.device import TunedDevice
from flash_helpers.results.lookup import tuned_configs

CPU_WORK = (4096, 512)  # tokens and hidden size: a sixteenth of a GPU's grid, so that it ends in minutes


def bench_command(
    seq_lens: Sequence[int],
    d_heads: Sequence[int],
    dtypes: str = "fp16",
    causal: str = "no",
    batch: int = 0,
    heads: int = 0,
    kernels: str = "all",
    peers: str = "default",
    rounds: int = 11,
    modes: Sequence[str] = DEFAULT_MODES,
    automatic: bool = False,
    json: Path | None = None,
    device: str | None = None,
    console: Console | None = None,
) -> Results:
    """Measures a grid, prints the table, writes the file. An interruption keeps the finished rows.

    Args:
        seq_lens, d_heads: of the grid.
        dtypes: names joined by commas.
        causal: ``no``, ``yes`` or ``both``.
        batch, heads: 0: chosen so that batch · seq_len and heads · d_head are the same for every size: 16384
            and 2048, on the CPU 4096 and 512.
        kernels: ``tuned``: the best of each tuned bucket of this card; or as in ``select_configs``.
        peers: see ``select_peers``.
        rounds, modes: see ``Plan``.
        automatic: measure ``attention()`` as well.
        json: result file to write, after each row; ``-``: standard output, in the end.
        device: default: the GPU if there is one.

    Raises:
        ValueError: an argument that names nothing; the message says what is valid.
        NotWritableError: ``json`` can't be written.
    """
    if causal not in CAUSAL:
        raise ValueError(f"causal is {causal!r}; valid: {', '.join(CAUSAL)}")
    check_file(json)
    console = console or console_for(json, width=160)
    others: list[Implementation] = select_peers(peers)
    if automatic:
        others.append(AttentionImplementation())
    where = named_device(device)
    tokens, width = (16384, 2048) if where.type == "cuda" else CPU_WORK
    problems = grid(
        [DType.from_string(name) for name in dtypes.split(",")],
        seq_lens,
        d_heads,
        CAUSAL[causal],
        batch,
        heads,
        tokens,
        width,
    )
    configs = _tuned(where) if kernels == "tuned" else select_configs(kernels)
    results = Results()

    def save() -> None:
        if json == STDOUT:
            write_json(json, results.to_json())
        elif json is not None:
            results.save(json)

    with shown_progress(Console(stderr=True)) as show:
        seen: set[Problem] = set()

        def on_row(row: Row) -> None:
            if row.problem not in seen:
                seen.add(row.problem)
                show("measured", len(seen), len(problems), row.problem.label())
            if json != STDOUT:
                save()

        try:
            bench(
                problems,
                configs,
                others,
                device=where,
                plan=Plan(rounds, tuple(dict.fromkeys(modes))),
                on_row=on_row,
                results=results,
            )
        except KeyboardInterrupt:
            console.print("interrupted: these are the finished rows", style="yellow")
    console.print(results_table(results, mode=modes[0]))
    save()
    return results


def _tuned(device: torch.device) -> list[ForwardConfig]:
    if device.type != "cuda":
        raise ValueError("kernels 'tuned' are those measured best on a GPU; there is none here")
    from flash_attention.backends.cuda import device_facts_of

    return tuned_configs(TunedDevice.of(device_facts_of(device)))
