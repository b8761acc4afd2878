"""Runs attention-gym's own speed script with this library's ``flex_attention`` and with PyTorch's.

    python benchmarks/attention_gym.py FOLDER --json FILE [--examples causal,alibi]

FOLDER is a checkout of attention-gym. Its ``examples/benchmark.py`` runs as it is, with its masks, sizes,
checks and timer, once for each contestant and round, in turn. Where this library runs, it is what the name
``flex_attention`` stands for. What the script times beside is timed once: attention with a causal mask, and
with a mask of S x S elements.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer

from flash_attention import flex_attention as ours
from flash_helpers.benchmark.ending import end_with
from flash_helpers.benchmark.environment import environment, gpu_state
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors

WHAT = "attention-gym's speed script, with this library's flex_attention and with PyTorch's"
METHOD = (
    "the script times each pass by triton.testing.do_bench, and compares results with a mask of S x S "
    "elements; contestants are run in turn in one process, and a row has the median of its rounds"
)
OPERATIONS = ("causal FA2", "F.sdpa + mask", "flexattention")  # in the order that the script times them
PASSES = ("forward", "backward")
Times = dict[tuple[str, str], float]  # (operation, pass): milliseconds


class _Timer:
    """The script's timer, which writes down what it measured.

    Attributes:
        times: of each operation and pass.
        known: of what is not to be measured again.
    """

    def __init__(self, timer: Callable[..., float], known: Times) -> None:
        self._timer, self.known, self.times = timer, known, Times()

    def __call__(self, function: Callable[[], Any], **options: Any) -> float:
        place = len(self.times)
        name = (OPERATIONS[place // 2], PASSES[place % 2])
        self.times[name] = self.known.get(name) or self._timer(function, **options)
        return self.times[name]


def load(folder: Path) -> ModuleType:
    """The script as a module.

    Raises:
        typer.BadParameter: the folder holds no such script.
    """
    path = folder / "examples" / "benchmark.py"
    if not path.is_file():
        raise typer.BadParameter(
            f"{folder} has no examples/benchmark.py; name a checkout of attention-gym", param_hint="FOLDER"
        )
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("attention_gym_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _replaced(module: ModuleType, **names: Any) -> Iterator[None]:
    """Other values of names of a module."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def run(
    script: ModuleType, example: str, attention: Callable[..., Any], known: Times
) -> tuple[Times, dict[str, Any]]:
    """Runs one example, and gives its times and the sizes it was called with."""
    timer, sizes = _Timer(script.do_bench, known), dict[str, Any]()
    test_mask = script.test_mask

    def noted(*args: Any, **options: Any) -> None:
        sizes.update(options)
        test_mask(*args, **(options | {"print_mask": False}))

    printed = io.StringIO()
    with (
        _replaced(script, do_bench=timer, flex_attention=attention, test_mask=noted),
        contextlib.redirect_stdout(printed),
    ):
        script.AVAILABLE_EXAMPLES[example]()
    torch.cuda.empty_cache()
    return timer.times, sizes


# ---------------------------------------------------------------------- the command
@shown_errors()
def main(
    folder: Annotated[Path, typer.Argument(help="a checkout of attention-gym")],
    json: Annotated[Path, typer.Option(help="result file")],
    examples: Annotated[str, typer.Option(help="names joined by commas; all, if empty")] = "",
    rounds: Annotated[int, typer.Option(help="runs of each contestant", min=1)] = 3,
) -> None:
    """Runs attention-gym's speed script with PyTorch's flex_attention and with this library's."""
    script = load(folder)
    contestants = {"attention": ours.flex_attention, "flex_attention": script.flex_attention}
    file = ResultFile("attention_gym", WHAT, direction="both", method=METHOD)
    for example in examples.split(",") if examples else script.AVAILABLE_EXAMPLES:
        found, known, sizes = {name: list[Times]() for name in contestants}, Times(), dict[str, Any]()
        trouble = dict[str, str]()
        for _ in range(rounds):
            for name, attention in contestants.items():
                if name in trouble:
                    continue
                try:
                    times, sizes = run(script, example, attention, known)
                except Exception as error:  # a contestant that fails has a row that says so
                    trouble[name] = f"{type(error).__name__}: {error}"[:300]
                    continue
                known = {key: times[key] for key in times if key[0] != OPERATIONS[2]}
                found[name].append(times)
        file.rows += (made := list(_rows(example, sizes, found, trouble)))
        file.save(json)
        print(_line(example, made), flush=True)
    end_with(file)


def _rows(
    example: str, sizes: dict[str, Any], found: dict[str, list[Times]], trouble: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """The rows of an example: both contestants, then what the script times beside."""
    device = torch.get_default_device()  # which the script sets
    others = {name: OPERATIONS[2] for name in found} | {name: name for name in OPERATIONS[:2]}
    everything = [times for runs in found.values() for times in runs]
    for name, operation in others.items():
        for direction in PASSES:
            runs = found.get(name, everything[:1])
            taken = [times[operation, direction] for times in runs]
            yield {
                "implementation": name,
                "kind": "kernel" if name == "attention" else "peer",
                "feature": example,
                "direction": direction,
                "problem": _problem(example, sizes),
                "milliseconds": {"hot": _timing(taken)} if taken and name not in trouble else {},
                **({"status": "failed", "reason": trouble[name]} if name in trouble else {}),
                "environment": environment(device),
                "gpu_state": gpu_state(device),
            }


def _problem(example: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Sizes of the script's call; those that it leaves out are its defaults."""
    seq_len, n_heads = sizes.get("S", 8192), sizes.get("H", 16)
    return {
        "dtype": "FP16", "batch": sizes.get("B", 16), "n_heads": n_heads, "n_heads_kv": n_heads,
        "seq_len_q": seq_len, "seq_len_k": seq_len, "d_head": sizes.get("D", 64),
        "causal": example == "causal",
    }  # fmt: skip


def _timing(taken: list[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(taken),
        "p20": min(taken),
        "p80": max(taken),
        "rounds": len(taken),
    }


def _line(example: str, rows: list[dict[str, Any]]) -> str:
    """Milliseconds of each operation, forward and backward."""
    text = []
    for row in rows:
        time = row["milliseconds"].get("hot", {}).get("median")
        shown = "failed" if time is None else f"{time:.3f}"
        text.append(f"{row['implementation']} {row['direction'][0]} {shown}")
    return f"{example:16} " + "  ".join(text)


if __name__ == "__main__":
    run_alone(main)
