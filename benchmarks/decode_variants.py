"""Times kernels and numbers of parts for one query over a cache of keys, against each other and the peers.

    python benchmarks/decode_variants.py --json decode_variants.json
    python benchmarks/decode_variants.py --batch 1 --keys 16 --parts 8,16,32 --kernels "(BF16, 128, 64, …"
    python benchmarks/decode_variants.py --page-size 64 --peers none

The variants of ``VARIANTS`` and those given by short form are compiled first, in parallel; one that spills is
left out, as is one whose result is wrong, or has other bits when it runs a second time. The others, what the
library chooses by itself, and the peers are measured in random order.

A measurement attends to several caches one after the other, as the layers of a model do, in one CUDA graph
that is replayed: together the caches are several times as large as the L2 cache: keys come from memory.
The mode ``cold`` is what the table of features uses: before each call the L2 cache is filled with other data.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from flash_attention.backends import cuda
from flash_attention.call import Call, Mask, Scores
from flash_attention.layouts import DENSE, Cached, Layout
from flash_helpers.benchmark.cases import Case, Inputs, make_inputs
from flash_helpers.benchmark.contestants import CONTESTANTS
from flash_helpers.benchmark.copy_rate import copy_rate
from flash_helpers.benchmark.correctness import output_error, reference
from flash_helpers.benchmark.ending import end_with
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.runner import named_device
from flash_helpers.benchmark.timers import timer_for
from flash_helpers.benchmark.timing import TimedCall, Timing, alternate
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors
from flash_helpers.kernel_configs import (
    DType,
    choose_hopper_kernel,
    parse_kernel_name_into_config,
)
from flash_helpers.kernels.ampere.forward.decode import choose_ampere_decode_config
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel
from flash_helpers.kernels.pages import page_obstacle
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.select.candidates import kernel_for, split_variant, unable_reason
from flash_helpers.select.prediction import parts_of_keys
from flash_helpers.select.select import Choice, select

DTYPE = DType.BF16
WHAT = "kernels and numbers of parts for one query over a cache of keys, and peers"
METHOD = (
    "graph: one CUDA graph attends to several caches in turn, which are larger together than the L2 cache; "
    "cold: before each call the L2 cache is filled with other data; what is wrong by a float32 reference, or "
    "has other bits in a second run, is not timed; random order in each round"
)
CACHES_BYTES = 256 << 20  # of all caches of a cell together, at least: five times an H100's L2 cache
MOST_CACHES = 32
CHOSEN = "chosen"  # name of what the library runs by itself

HOPPER_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    # The same bytes under way; smaller tiles shorten the work on the last one, which nothing hides.
    ("128 keys, 3 stages", dict(B_c=128, kv_stages=3)),
    ("64 keys, 6 stages", dict(B_c=64, kv_stages=6)),
    ("64 keys, 4 stages", dict(B_c=64, kv_stages=4)),
    ("32 keys, 8 stages", dict(B_c=32, kv_stages=8)),
    # Without the overlap a tile's steps follow each other, and the last tile has one barrier less.
    ("64 keys, 6 stages, serial", dict(B_c=64, kv_stages=6, overlap_products=False, forced_overlap=False)),
)
AMPERE_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mma.sync, 64 keys, 3 stages", dict(B_c=64, kv_stages=3)),  # two blocks an SM
    ("mma.sync, 32 keys, 6 stages", dict(B_c=32, kv_stages=6)),
)


@dataclass(frozen=True)
class Variant:
    """One kernel with one number of parts.

    Attributes:
        name: in tables.
        choice: what runs; its kernel takes the keys in one go where there is one part.
    """

    name: str
    choice: Choice


def configurations(facts: DeviceFacts, d_head: int, short_forms: Sequence[str]) -> dict[str, ForwardConfig]:
    """The configurations to compare, by name: those of the device's families, and those given."""
    found: dict[str, ForwardConfig] = {}
    if facts.capability == (9, 0):
        hopper, _ = choose_hopper_kernel(DTYPE, d_head, False, 1, traits=ForwardTraits(split=True))
        found["wgmma, as chosen"] = hopper.config
        found |= {name: replace(hopper.config, **changes) for name, changes in HOPPER_VARIANTS}
    ampere = choose_ampere_decode_config(DTYPE, d_head, facts)
    found["mma.sync, as chosen"] = ampere
    found |= {name: replace(ampere, **changes) for name, changes in AMPERE_VARIANTS}
    for text in short_forms:
        config = parse_kernel_name_into_config(text)
        found[config.short_form()] = config
    able = {config: name for name, config in reversed(found.items()) if not config.infeasible_reason(facts)}
    return {name: config for config, name in reversed(able.items())}  # each once, under its first name


def problem_of(case: Case, page_size: int = 0) -> AttentionProblem:
    """The problem of a row of the benchmark of features, with a cache in pages if they have a size."""
    sizes = (case.batch, case.seq_q, case.seq_k, case.heads, case.heads_kv)
    problem = AttentionProblem(DTYPE, *sizes, case.d_head, case.d_head)
    if not page_size:
        return problem
    obstacle = page_obstacle(page_size)
    return replace(problem, varlen=True, cached=True, paged=True, tma_obstacle=obstacle)


def variants_of(
    case: Case,
    configs: dict[str, ForwardConfig],
    parts: Sequence[int],
    facts: DeviceFacts,
    page_size: int = 0,
) -> list[Variant]:
    """Every configuration with the parts that ``n_splits`` says and those given, and the library's choice.

    Args:
        case: the cell.
        configs: by name.
        parts: further numbers of parts; more than there are tiles of keys are left out.
        facts: the device.
        page_size: keys of a page; 0: the cache is in one piece.
    """
    given = problem_of(case, page_size)
    packed = given.with_rows_packed()
    found = [Variant(CHOSEN, select(given, facts, explained=False))]
    for name, config in configs.items():
        if unable_reason(config, packed, [config]):
            continue
        kernel = kernel_for(config, packed)
        split = split_variant(kernel)
        assert split is not None
        own = parts_of_keys(split, packed, facts)
        for n in dict.fromkeys((own, *parts)):
            if n > max(1, case.seq_k // config.B_c):
                continue
            text = f"{name} / {n}" + ("" if n == own else " !")
            found.append(Variant(text, Choice(split if n > 1 else kernel, "", n_splits=n, problem=packed)))
    return found


# ---------------------------------------------------------------------- calls
def caches(case: Case, device: torch.device) -> list[Inputs]:
    """As many caches as make the L2 cache useless, with one query each."""
    n = max(2, min(MOST_CACHES, -(-CACHES_BYTES // case.cache_bytes())))
    first = make_inputs(case, device)
    return [first, *(Inputs(first.q.clone(), first.k.clone(), first.v.clone(), None) for _ in range(n - 1))]


def in_pages(x: Inputs, page_size: int) -> tuple[Inputs, Cached]:
    """The same keys and values in pages of a random order, and what finds them."""
    batch, seq_len_k = x.k.shape[:2]
    n_pages = batch * seq_len_k // page_size
    generator = torch.Generator(x.k.device).manual_seed(0)
    places = torch.randperm(n_pages, generator=generator, device=x.k.device)
    k, v = (torch.empty_like(t).view(n_pages, page_size, *t.shape[2:]) for t in (x.k, x.v))
    for pages, t in ((k, x.k), (v, x.v)):
        pages[places] = t.reshape(pages.shape)
    table = places.int().view(batch, -1)
    return Inputs(x.q, k, v, None), Cached(torch.full_like(table[:, 0], seq_len_k), table)


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A call that makes one of ``calls`` after the other."""
    order = itertools.cycle(calls)
    return lambda: next(order)()


def variant_call(variant: Variant, case: Case, x: Inputs, page_size: int) -> Callable[[], Tensor]:
    """Runs a variant on one cache."""
    layout: Layout = DENSE
    if page_size:
        x, layout = in_pages(x, page_size)
    asked = Call(x.q, x.k, x.v, torch.empty_like(x.q), None, Mask(), Scores(case.d_head**-0.5), layout)

    def call() -> Tensor:
        cuda.run(asked, variant.choice)
        return asked.out

    return call


def wrong_reason(call: Callable[[], Tensor], n_layers: int, expected: Tensor, own: bool) -> str | None:
    """Why a contestant is wrong, or None. All layers have equal caches, and each call takes the next one.

    Args:
        call: what is examined.
        n_layers: after so many calls the first cache's turn comes again.
        expected: the result.
        own: two runs must agree bit for bit, and find a poisoned output.
    """
    results = [call() for _ in range(n_layers)]
    first = results[0].clone()
    if own:
        results[0].fill_(float("nan"))
        if not torch.equal(first, call()) or not all(torch.equal(first, x) for x in results):
            return "two runs differ"
        for _ in range(n_layers - 1):
            call()
    return output_error(first, expected).wrong_reason(DTYPE)


# ---------------------------------------------------------------------- measuring
def build(kernels: Sequence[Any], facts: DeviceFacts, jobs: int, console: Console) -> set[Any]:
    """Builds the kernels; returns those that were not spilled."""
    from flash_helpers.build import build_kernels

    start, good = time.perf_counter(), set()
    built = [k for result in build_kernels(kernels, [facts.target], jobs) for k in result.kernels]
    for kernel in built:
        if kernel.spill_bytes:
            console.print(f"left out  {kernel.kernel.short_form()}: {kernel.spill_bytes} bytes spilled")
        else:
            good.add(kernel.kernel)
    console.print(f"{len(built)} kernels built in {time.perf_counter() - start:.0f} s", highlight=False)
    return good


def measure_cell(
    case: Case,
    variants: Sequence[Variant],
    peers: Sequence[str],
    modes: Sequence[str],
    rounds: int,
    device: torch.device,
    page_size: int = 0,
) -> list[dict[str, Any]]:
    """Times of all that are right, one row each; the others with the reason."""
    layers, timer = caches(case, device), timer_for(device)
    expected = reference(layers[0].q, layers[0].k, layers[0].v)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, TimedCall] = {}
    problem = case.to_json() | ({"page_size": page_size} if page_size else {})
    for variant in variants:
        choice = variant.choice
        rows[variant.name] = {
            "implementation": choice.kernel.short_form(), "kind": "kernel", "problem": problem,
            "variant": variant.name, "n_splits": choice.n_splits, "milliseconds": {},
        }  # fmt: skip
        own = [variant_call(variant, case, x, page_size) for x in layers]
        calls[variant.name] = TimedCall(in_turn(own))
    for contestant in CONTESTANTS:
        if contestant.name in peers:
            rows[contestant.name] = {
                "implementation": contestant.name, "kind": "peer", "problem": problem, "milliseconds": {}
            }  # fmt: skip
            try:
                theirs = [contestant.bind(case, x) for x in layers]
                calls[contestant.name] = TimedCall(in_turn(theirs), contestant.context)
            except Exception as error:
                rows[contestant.name] |= _failed(error)
    for name, timed in list(calls.items()):
        try:
            with timed.context():
                own_row = rows[name]["kind"] == "kernel"
                why = wrong_reason(timed.call, len(layers), expected, own=own_row)
            if why:
                rows[name] |= {"status": "wrong", "reason": why}
                del calls[name]
                continue
            timer.estimate(timed)
            timed.repeats = len(layers)
        except Exception as error:
            rows[name] |= _failed(error)
            del calls[name]
    for mode in modes:
        samples, failures = alternate(calls, timer.measure(mode), rounds)
        for name, failure in failures.items():
            rows[name] |= _failed(failure, f"{mode}: ")
        for name, values in samples.items():
            rows[name]["milliseconds"][mode] = Timing.of(values).to_json()
    return list(rows.values())


def _failed(error: Exception, before: str = "") -> dict[str, str]:
    first_line = (str(error).splitlines() or [""])[0]
    return {"status": "failed", "reason": f"{before}{type(error).__name__}: {first_line[:300]}"}


def table_of(rows: Sequence[dict[str, Any]], mode: str, copied: float) -> Table:
    """A line a contestant, quickest first: microseconds, share of the copy rate, over the best peer's."""
    problem = rows[0]["problem"]
    title = f"b{problem['batch']} {problem['seq_len_k']} keys, {mode}"
    table = Table(title=title, title_justify="left")
    for column in ("who / parts", "us", "of a copy", "/ best peer"):
        table.add_column(column, justify="left" if column.startswith("who") else "right")
    cache_bytes = Case.from_json("decode", problem).cache_bytes()
    timed = [(1e3 * row["milliseconds"][mode]["median"], row) for row in rows if mode in row["milliseconds"]]
    best_peer = min((us for us, row in timed if row["kind"] == "peer"), default=None)
    for us, row in sorted(timed, key=lambda pair: pair[0]):
        name = _name(row) + (f" / {row['n_splits']}" if _name(row) == CHOSEN else "")
        ratio = f"{us / best_peer:.3f}" if best_peer else ""
        table.add_row(name, f"{us:.2f}", f"{cache_bytes / us * 1e6 / copied:.3f}", ratio)
    return table


def _name(row: dict[str, Any]) -> str:
    return row.get("variant") or row["implementation"]


@shown_errors()
def main(
    batch: Annotated[str, typer.Option(help="batch sizes, joined by commas")] = "1,8,32",
    keys: Annotated[str, typer.Option(help="thousands (1024) of keys, by commas")] = "1,2,4,8,16,32,64",
    heads: Annotated[int, typer.Option(help="query heads")] = 32,
    heads_kv: Annotated[int, typer.Option(help="heads of K and V")] = 8,
    d_head: Annotated[int, typer.Option(help="head size, of a kernel that there is: 64, 128, 256")] = 128,
    page_size: Annotated[int, typer.Option(help="keys of a page; 0: caches in one piece, as peers want")] = 0,
    parts: Annotated[str, typer.Option(help="more numbers of parts for every variant")] = "",
    kernels: Annotated[str, typer.Option(help="more kernels: short forms joined by ;")] = "",
    only: Annotated[bool, typer.Option(help="only the kernels that are given, and what is chosen")] = False,
    peers: Annotated[str, typer.Option(help="names joined by commas, or none")] = "fa2,cudnn,fa3",
    rounds: Annotated[int, typer.Option(help="measurements of each")] = 7,
    modes: Annotated[str, typer.Option(help="graph, cold, …, joined by commas")] = "graph",
    seconds: Annotated[float, typer.Option(help="no cell begins after this")] = 90.0,
    jobs: Annotated[int, typer.Option(help="compilers at a time; 0: one a core")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
    build_only: Annotated[bool, typer.Option(help="compile for an H100, and say what is left out")] = False,
) -> None:
    """Times variants for one query over a cache of keys."""
    start = time.monotonic()
    console = Console(width=None if os.isatty(1) else 160)
    if build_only:
        from flash_helpers.kernel_configs import device_facts

        facts = device_facts("H100")
    else:
        from flash_attention.backends.cuda import device_facts_of

        device = named_device("cuda:0")
        facts = device_facts_of(device)
    given = [text.strip() for text in kernels.split(";") if text.strip()]
    configs = configurations(facts, d_head, given)
    if only:
        configs = {name: config for name, config in configs.items() if name in given}
    counts = [int(n) for n in parts.split(",") if n]
    cells = [
        Case("decode", int(b), 1, int(thousands) * 1024, heads, heads_kv, d_head=d_head)
        for b in batch.split(",")
        for thousands in keys.split(",")
    ]
    of_cell = {case: variants_of(case, configs, counts, facts, page_size) for case in cells}
    everything = {variant.choice.kernel for variants in of_cell.values() for variant in variants}
    good = build(
        sorted(everything, key=ForwardKernel.short_form), facts, jobs or os.cpu_count() or 1, console
    )
    if build_only:
        raise typer.Exit(0 if len(good) == len(everything) else 1)

    copied, skipped = copy_rate(device), list[str]()
    facts_found = {"copy_bytes_per_second": copied, "skipped": skipped}
    file = ResultFile(
        "decode_variants", WHAT, environment=environment(device), facts=facts_found, method=METHOD
    )
    console.print(f"copy: {copied / 1e9:.0f} GB/s read and written", highlight=False)
    for case, variants in of_cell.items():
        if time.monotonic() - start > seconds:
            skipped.append(case.label())
            continue
        usable = [v for v in variants if v.choice.kernel in good]
        them = [] if page_size else peers.split(",")
        rows = measure_cell(case, usable, them, modes.split(","), rounds, device, page_size)
        file.rows += rows
        if json_file is not None:
            file.save(json_file)
        for mode in modes.split(","):
            console.print(table_of(rows, mode, copied))
        for row in rows:
            if "reason" in row:
                console.print(f"{_name(row)}: {row['reason']}", markup=False, highlight=False)
    console.print(
        f"{len(skipped)} cells skipped, done after {time.monotonic() - start:.0f} s",
        highlight=False,
    )
    end_with(file)


if __name__ == "__main__":
    run_alone(main)
