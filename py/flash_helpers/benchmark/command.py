"""What ``flash-attention bench`` and ``tools/benchmark/run_kernels.py`` do.

Arguments are checked before torch is imported, which takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from flash_helpers.benchmark.implementations import AttentionImplementation, Implementation
from flash_helpers.benchmark.peers import select_peers
from flash_helpers.benchmark.plan import DEFAULT_MODES, Plan, check_device_name
from flash_helpers.benchmark.results import Results, Row
from flash_helpers.benchmark.table import results_table
from flash_helpers.console.output import STDOUT, console_for, error_console
from flash_helpers.console.progress import shown_progress
from flash_helpers.console.writable import check_file
from flash_helpers.kernel_selection import CAUSAL, select_configs
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.kernels.problem import FORWARD
from flash_helpers.problem import Problem, grid
from flash_helpers.select.choice import check_head_size

if TYPE_CHECKING:
    import torch

GPU_WORK, CPU_WORK = (16384, 2048), (4096, 512)  # tokens and hidden size: on the CPU it ends in minutes, too
CHOSEN, TUNED = "attention", "tuned"


def bench_command(
    seq_lens: Sequence[int],
    d_heads: Sequence[int],
    dtypes: str = "fp16",
    causal: str = "no",
    batch: int = 0,
    heads: int = 0,
    kernels: str = CHOSEN,
    peers: str = "default",
    rounds: int = 11,
    modes: Sequence[str] = DEFAULT_MODES,
    automatic: bool = False,
    json: Path | None = None,
    device: str | None = None,
    console: Console | None = None,
    direction: str = FORWARD,
) -> Results:
    """Measures a grid, prints the table, writes the file. An interruption keeps the finished rows.

    Args:
        seq_lens, d_heads: of the grid.
        dtypes: names joined by commas.
        causal: ``no``, ``yes`` or ``both``.
        batch, heads: 0: chosen so that batch · seq_len and heads · d_head are the same for every size: 16384
            and 2048, on the CPU 4096 and 512.
        kernels: ``attention``: what ``attention()`` chooses for each size; ``tuned``: the best of each tuned
            bucket of this card; or as in ``select_configs``. On a size for which the set has no kernel,
            ``attention()`` is timed in its place, unless the set is ``none``.
        peers: see ``select_peers``.
        rounds, modes: see ``Plan``.
        automatic: measure ``attention()`` on every size.
        json: result file to write, after each row; ``-``: standard output, in the end.
        device: default: the GPU if there is one.
        direction: ``forward``, or ``backward``: gradients, those of the peers by autograd.

    Raises:
        ValueError: an argument that names nothing; the message says what is valid.
        NotWritableError: ``json`` can't be written.
        KeyboardInterrupt: the finished rows are shown and written.
    """
    if causal not in CAUSAL:
        raise ValueError(f"causal is {causal!r}; valid: {', '.join(CAUSAL)}")
    check_file(json)
    console = console or console_for(json)
    others: list[Implementation] = select_peers(peers)
    if automatic or kernels == CHOSEN:
        others.append(AttentionImplementation())
    names = [DType.from_string(name) for name in dtypes.split(",")]
    plan = Plan(rounds, tuple(dict.fromkeys(modes)))
    configs = [] if kernels in (CHOSEN, TUNED) else select_configs(kernels)
    if automatic or kernels != "none":  # peers alone may be of any size
        for d_head in d_heads:
            check_head_size(d_head)
    check_device_name(device)
    # It refuses sizes that are none.
    grid(names, seq_lens, d_heads, CAUSAL[causal], batch, heads, direction=direction)
    if not configs and not others and kernels != TUNED:
        raise ValueError("there is nothing to measure: no kernel and no peer is given; name one")

    from flash_helpers.benchmark.runner import bench, named_device

    where = named_device(device)
    work = GPU_WORK if where.type == "cuda" else CPU_WORK
    problems = grid(names, seq_lens, d_heads, CAUSAL[causal], batch, heads, *work, direction=direction)
    if kernels == TUNED:
        configs = _tuned(where)
    for line in _without_kernel(problems, configs, kernels):
        console.print(line, style="yellow", markup=False)
    results, interrupted = Results(), None

    def save() -> None:
        if json == STDOUT:
            sys.stdout.write(results.file().text())
        elif json is not None:
            results.save(json)

    with shown_progress(error_console()) as show:
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
                fallback=None if kernels == "none" else AttentionImplementation(),
                device=where,
                plan=plan,
                on_row=on_row,
                results=results,
            )
        except KeyboardInterrupt as error:
            interrupted = error
    if interrupted is not None:
        console.print("interrupted: these are the finished rows", style="yellow")
    console.print(results_table(results, mode=modes[0]))
    save()
    if interrupted is not None:
        raise interrupted
    return results


def _without_kernel(problems: Sequence[Problem], configs: Sequence[KernelConfig], kernels: str) -> list[str]:
    """A line for each type and head size that the named set has no kernel for."""
    if kernels in (CHOSEN, "none"):
        return []
    missing = {
        (p.dtype, p.d_head, p.direction) for p in problems if not any(p.fits(config) for config in configs)
    }
    return [
        f"{kernels!r} has no {direction} kernel for {dtype.name.lower()} and head size {d_head}: "
        "attention() is timed"
        for dtype, d_head, direction in sorted(missing)
    ]


def _tuned(device: torch.device) -> list[KernelConfig]:
    if device.type != "cuda":
        raise ValueError("kernels 'tuned' are those measured best on a GPU; there is none here")
    from flash_attention.backends.cuda import device_facts_of
    from flash_helpers.results.device import TunedDevice
    from flash_helpers.results.lookup import tuned_configs

    return tuned_configs(TunedDevice.of(device_facts_of(device)))
