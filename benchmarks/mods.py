"""Times masks and score functions of the user's beside their built-in twins and compiled ``flex_attention``.

    python benchmarks/mods.py --json FILE [--direction backward] [--lengths 1024,4096] [--masks causal,alibi]
        [--family ampere]

Contestants of a cell: ``mod``, this library with the function; ``twin``, this library with what says the same
without one, such as ``causal=True``; ``plain``, neither mask nor score; ``flex``, PyTorch's, compiled
for these lengths. All kernels are built first, in parallel, and other processes compile PyTorch's into its
cache meanwhile. Who is wrong is not timed. A cell begins only within ``--seconds``. With ``--family`` this
library's kernels are those that a family has by default.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from mod_cases import CASES, Case, Inputs, Mods, Size, expected, inputs
from mod_kernels import Cell, build, insisted, row_offsets
from torch import Tensor

import flash_attention
from flash_helpers.benchmark.ending import end_with
from flash_helpers.benchmark.environment import environment, gpu_state
from flash_helpers.benchmark.implementations import Prepared, UnavailableError, last_kernel_name
from flash_helpers.benchmark.measuring import Measured, measure_checked
from flash_helpers.benchmark.plan import Plan
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.timers import timer_for
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import FAMILIES
from flash_helpers.kernels.problem import BACKWARD, FORWARD

LENGTHS, HEAD_SIZES = (1024, 4096, 16384), (64, 128)
WHAT = "masks and score functions, their built-in twins, and flex_attention of torch"


# ---------------------------------------------------------------------- who takes part
def ours(x: Inputs, options: Mods, backward: bool) -> Prepared:
    """This library, with keywords of ``attention`` or with ends of documents."""
    options = dict(options)
    ends = options.pop("documents", None)
    if ends is None:
        return _prepared(partial(flash_attention.attention, **options), x, backward)
    batch, seq_len = x.q.shape[:2]
    offsets, longest = row_offsets(ends, batch, seq_len, x.q.device)
    attend = partial(flash_attention.attention_varlen, **options)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = (t.flatten(0, 1) for t in (q, k, v))
        out: Tensor = attend(*rows, offsets, offsets, longest, longest)
        return out.view(q.shape)

    return _prepared(packed, x, backward)


def flex(x: Inputs, mods: Mods, backward: bool) -> Prepared:
    """PyTorch's, compiled, with tensors in the order of its own axes."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seq_len, options = x.q.shape[1], dict(mods)
    if mask_mod := options.pop("mask_mod", None):
        device = x.q.device.type
        options["block_mask"] = create_block_mask(mask_mod, None, None, seq_len, seq_len, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    turned = Inputs(*(t.transpose(1, 2).contiguous() for t in x))
    own = _prepared(partial(compiled, **options), turned, backward, named=False)

    def call() -> Any:
        made = own.call()
        return tuple(t.transpose(1, 2) for t in made) if isinstance(made, tuple) else made.transpose(1, 2)

    return Prepared(call)


def _prepared(forward: Callable[..., Tensor], x: Inputs, backward: bool, named: bool = True) -> Prepared:
    """The forward pass, or the backward pass alone of one that is run once."""
    ran = last_kernel_name if named else str
    if not backward:
        return Prepared(torch.no_grad()(lambda: forward(x.q, x.k, x.v)), ran=ran)
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    try:
        out = forward(*leaves)
    except NotImplementedError as error:
        raise UnavailableError(str(error)) from error
    return Prepared(lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True))


def contestants(
    cell: Cell, x: Inputs, mods: Mods, backward: bool, peers: bool, family: str
) -> dict[str, Any]:
    """Who is measured on a cell, by name."""
    case, size = cell
    options: dict[str, Mods] = {"mod": mods}
    if case.twin is not None:
        options["twin"] = case.twin(size)
    if case.name != "noop":  # whose twin it is
        options["plain"] = {}
    named = insisted(cell, x.q.device, backward, family)
    found: dict[str, Any] = {
        name: partial(ours, x, {**own, **named.get(name, {})}, backward) for name, own in options.items()
    }
    if peers:
        found["flex"] = partial(flex, x, mods, backward)
    return found


# ---------------------------------------------------------------------- the peer, ahead of time
def compile_peers(cells: list[Cell], device: torch.device, backward: bool) -> None:
    """Compiles PyTorch's kernels into its cache: one process of several."""
    for case, size in cells:
        x = inputs(size, device)
        try:
            flex(x, case.mods(size, device), backward).call()
        except Exception as error:
            print(f"{case.name} {size}: {type(error).__name__}: {error}"[:300], file=sys.stderr)


# ---------------------------------------------------------------------- the command
@shown_errors()
def main(
    json: Annotated[Path, typer.Option(help="result file")],
    direction: Annotated[str, typer.Option(help="forward or backward")] = FORWARD,
    masks: Annotated[str, typer.Option(help="names joined by commas")] = ",".join(c.name for c in CASES),
    lengths: Annotated[str, typer.Option(help="sequence lengths")] = ",".join(map(str, LENGTHS)),
    head_sizes: Annotated[str, typer.Option(help="head sizes")] = ",".join(map(str, HEAD_SIZES)),
    rounds: Annotated[int, typer.Option(help="measurements of each contestant")] = 7,
    modes: Annotated[str, typer.Option(help="timings, of hot, paused, cold, graph, call, host")] = "hot",
    seconds: Annotated[float, typer.Option(help="no cell starts after this")] = 190.0,
    processes: Annotated[int, typer.Option(help="that compile PyTorch's kernels; 0: none, no peer")] = 6,
    share: Annotated[int, typer.Option(help="of these processes, which one this is", hidden=True)] = -1,
    family: Annotated[str, typer.Option(help="whose default kernels run; empty: attention chooses")] = "",
    device_name: Annotated[str, typer.Option("--device", help="cuda or cpu")] = "cuda",
) -> None:
    """Times masks and score functions beside their built-in twins and compiled flex_attention."""
    start = time.monotonic()
    device, backward, names = torch.device(device_name), direction == BACKWARD, masks.split(",")
    if family not in ("", *(f.name for f in FAMILIES)):
        known = ", ".join(f.name for f in FAMILIES)
        raise typer.BadParameter(f"{family!r} is no family; allowed: {known}, or none", param_hint="--family")
    cells = [
        (case, Size(int(n), int(d)))
        for n in lengths.split(",")
        for d in head_sizes.split(",")
        for case in CASES
        if case.name in names and int(n) in (case.lengths or (int(n),))
    ]
    torch._dynamo.config.cache_size_limit = 4 * len(cells)
    if share >= 0:
        compile_peers(cells[share::processes], device, backward)
        return
    own = [sys.executable, *sys.argv]
    others = [subprocess.Popen([*own, "--share", str(i)]) for i in range(processes)]
    trouble = build(cells, device, backward, family)
    built = time.monotonic() - start
    for other in others:
        other.wait()
    facts = {"build_seconds": round(built, 1), "compiled_seconds": round(time.monotonic() - start, 1)}
    print(
        f"built after {built:.0f} s, all compiled after {time.monotonic() - start:.0f} s {trouble}",
        flush=True,
    )
    file = ResultFile(
        "mods", WHAT, facts=facts | ({"trouble": trouble} if trouble else {}), direction=direction
    )
    for number, cell in enumerate(cells):
        if time.monotonic() - start > seconds:
            file.facts["skipped"] = [f"{case.name} {size}" for case, size in cells[number:]]
            print(f"time is over; left out: {len(cells) - number} cells")
            break
        plan = Plan(rounds, tuple(modes.split(",")))
        file.rows += measure(cell, device, backward, plan, processes > 0, family)
        file.save(json)
    end_with(file)


def measure(
    cell: Cell, device: torch.device, backward: bool, plan: Plan, peers: bool, family: str
) -> list[dict[str, Any]]:
    """The rows of one cell."""
    case, size = cell
    x, mods = inputs(size, device), case.mods(size, device)
    label = f"{case.name} s{size.seq_len} d{size.d_head}"
    with torch.enable_grad() if backward else torch.no_grad():
        found = measure_checked(
            contestants(cell, x, mods, backward, peers, family),
            lambda: references(cell, x, mods, backward),
            DType.BF16,
            device,
            timer_for(device),
            plan,
            label,
        )
    print(line(label, found, plan.modes[0]), flush=True)
    return [row(case, size, name, one, device) for name, one in found.items()]


def references(cell: Cell, x: Inputs, mods: Mods, backward: bool) -> dict[str, Any]:
    """The right result of each contestant."""
    right = expected(mods, x, backward)
    found = dict.fromkeys(("mod", "twin", "flex"), right)
    if cell[0].name != "noop":
        found["plain"] = expected({}, x, backward)
    return found


def line(label: str, found: dict[str, Measured], mode: str) -> str:
    """Milliseconds of each contestant, and how many times as long as the mod the others take."""
    times = {name: one.timings[mode].median for name, one in found.items() if mode in one.timings}
    mine = times.get("mod")
    text = [f"{n} {t:.4f}" + (f" ({t / mine:.2f})" if mine and n != "mod" else "") for n, t in times.items()]
    text += [f"{n} {one.status}: {one.reason[:90]}" for n, one in found.items() if one.status != "ok"]
    return f"{label:24} " + "  ".join(text)


def row(case: Case, size: Size, name: str, one: Measured, device: torch.device) -> dict[str, Any]:
    """A row of the result file."""
    made = {
        "implementation": "flex_attention" if name == "flex" else "attention",
        "kind": "peer" if name == "flex" else "kernel",
        "feature": case.name,
        "variant": name,
        "problem": {
            "dtype": "BF16", "batch": size.batch, "n_heads": size.n_heads, "n_heads_kv": size.n_heads,
            "seq_len_q": size.seq_len, "seq_len_k": size.seq_len, "d_head": size.d_head,
            "causal": case.name == "causal" and name != "plain",
        },
        "milliseconds": {mode: timing.to_json() for mode, timing in one.timings.items()},
        "environment": environment(device),
        "gpu_state": gpu_state(device),
    }  # fmt: skip
    said = {
        "status": one.status if one.status != "ok" else "",
        "reason": one.reason,
        "error": one.error,
        "kernel": one.kernel,
    }
    return made | {key: value for key, value in said.items() if value not in ("", None)}


if __name__ == "__main__":
    run_alone(main)
