"""What a call costs on each way into the library, and what compiling it costs.

    python -m flash_helpers.benchmark.call_paths --out call-paths.json

Host times of one small call: eager, which skips PyTorch's dispatcher; the operator, which is what eager calls
would be without that; a compiled function with the call in it; and PyTorch's own attention both ways. Then
what ``torch.compile`` counts over ten lengths: graphs, graph breaks, recompilations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from flash_attention import attention
from flash_helpers.benchmark.correctness import reference
from flash_helpers.benchmark.environment import environment, gpu_state
from flash_helpers.benchmark.host_time import SMALL
from flash_helpers.benchmark.implementations import Prepared
from flash_helpers.benchmark.measuring import measure_checked
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.results import problem_to_json
from flash_helpers.benchmark.timers import timer_for
from flash_helpers.benchmark.timing import Timer, Timing
from flash_helpers.console.writable import check_file
from flash_helpers.problem import Problem

BENCHMARK, WHAT = "call_paths", "host time of a call on each way into the library"
TEN_LENGTHS = (128, 200, 77, 259, 512, 64, 333, 1024, 90, 701)
Call = Callable[[Tensor, Tensor, Tensor], Any]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attention(q, k, v, causal=True)


def _operator(q: Tensor, k: Tensor, v: Tensor) -> Any:
    # sinks, causal, softmax_scale, window, softcap, return_lse, config, out_dtype, n_sms, deterministic,
    # backward_config, numerics, mod, captured, whole_numbers, real_numbers, keep_lse
    options = (None, True, None, None, None, 0.0, False, None, None, None, False, None, None)
    return torch.ops.flash_attention.attention(q, k, v, *options, None, [], [], [], False)


def _pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def call_paths(backend: str) -> dict[str, Call]:
    """The ways, by name. Those that compile do it at their first call.

    Args:
        backend: of ``torch.compile``.
    """

    def compiled(call: Call) -> Call:
        return torch.compile(call, fullgraph=True, dynamic=False, backend=backend)

    return {
        "attention": _attention,
        "operator": _operator,
        "attention compiled": compiled(_attention),
        "PyTorch": _pytorch,
        "PyTorch compiled": compiled(_pytorch),
    }


def call_times(
    device: torch.device,
    backend: str = "inductor",
    problem: Problem = SMALL,
    rounds: int = 31,
    timer: Timer | None = None,
) -> dict[str, Timing]:
    """Host time of one call by way, milliseconds; on the CPU that of the whole call.

    Args:
        backend: of ``torch.compile``.
        problem: one whose kernel the host never waits for.
        timer: None: the device's.

    Raises:
        RuntimeError: a way computes something else, or raises.
    """
    timer = timer or timer_for(device)
    mode = "host" if "host" in timer.modes else "call"
    q, k, v = problem.inputs(device)
    ways = {name: partial(call, q, k, v) for name, call in call_paths(backend).items()}
    with torch.inference_mode():
        measured = measure_checked(
            {name: partial(Prepared, way) for name, way in ways.items()},
            lambda: reference(q, k, v, causal=True),
            problem.dtype,
            device,
            timer,
            Plan(rounds, (mode,)),
            problem.label(),
        )
    for name, one in measured.items():
        if one.status != "ok":
            raise RuntimeError(f"the way {name!r} is not timed, it is {one.status}: {one.reason}")
    return {name: one.timings[mode] for name, one in measured.items()}


def compile_counters(
    device: torch.device, backend: str = "inductor", lengths: Sequence[int] = TEN_LENGTHS
) -> dict[str, Any]:
    """What ``torch.compile`` counts while a function with a call of ``attention`` meets new lengths.

    Returns:
        ``lengths``; ``graphs``: how many there are after each length; ``graph_breaks``; ``recompilations``:
        graphs beyond the first. One recompilation, to a graph of any length, is PyTorch's own way.
    """

    def layer(x: Tensor) -> Tensor:
        return _attention(x.sin(), x, x).flatten(2) * 2

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(layer, backend=backend)  # without fullgraph, where a graph break would raise
    graphs = []
    with torch.inference_mode():
        for length in lengths:
            compiled(torch.ones(2, length, 4, 64, dtype=torch.float16, device=device))
            graphs.append(counters["stats"]["unique_graphs"])
    return {
        "lengths": list(lengths),
        "graphs": graphs,
        "graph_breaks": sum(counters["graph_break"].values()),
        "recompilations": graphs[-1] - 1,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_helpers.benchmark.call_paths", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, help="write JSON there")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args(arguments)
    try:
        check_file(options.out, "--out")
        Plan(options.rounds)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times = call_times(device, options.backend, rounds=options.rounds)
    counted = compile_counters(device, options.backend)
    for name, timing in times.items():
        p20, median, p80 = (1000 * (t or 0.0) for t in (timing.p20, timing.median, timing.p80))
        print(f"{name:20} {median:8.1f} us a call ({p20:.1f} to {p80:.1f})")
    print(
        f"compiled for {len(counted['lengths'])} lengths: {counted['graphs'][-1]} graphs, "
        f"{counted['graph_breaks']} graph breaks, {counted['recompilations']} recompilations"
    )
    if options.out:
        mode = "host" if device.type == "cuda" else "call"
        rows = [
            {
                "implementation": name,
                "kind": "peer" if name.startswith("PyTorch") else "kernel",
                "problem": {**problem_to_json(SMALL), "causal": True},
                "milliseconds": {mode: timing.to_json()},
                "gpu_state": gpu_state(device),
            }
            for name, timing in times.items()
        ]
        facts = {"torch_compile": counted}
        ResultFile(BENCHMARK, WHAT, rows, environment(device), facts).save(options.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
