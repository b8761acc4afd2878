"""What each feature costs and gives, beside the peers that have it.

``python -m flash_helpers.benchmark.features --out DIR`` times causal, windows, grouped heads, sequences of
different lengths, one query over a cache of 1k to 128k keys (beside the card's copy rate, measured in the
same run), and what a plain kernel would lose if it were compiled for windows too. All contestants of a row
are timed in turns, in random order.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_helpers.benchmark.correctness import output_error
from flash_helpers.benchmark.environment import environment
from flash_helpers.benchmark.peers import _is_installed
from flash_helpers.benchmark.runner import default_device
from flash_helpers.benchmark.timing import TimedCall, Timing, alternate, timer_for
from flash_helpers.flops import attention_flop, visible_pairs
from flash_helpers.kernel_configs import DType, ForwardKernel

DTYPE = torch.bfloat16
TOKENS, HEADS, HEADS_KV, D_HEAD = 16384, 32, 8, 128
CACHE_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)  # thousands (1024) of keys
CACHE_BATCHES = (1, 8, 32)
CACHE_BYTES = 24 << 30  # caches beyond this are left out
ROUNDS = 7
COPY_BYTES = 1 << 30
COMPILING = ("fa4",)  # seconds for each new kind of problem


@dataclass(frozen=True)
class Case:
    """One row of the benchmark.

    Attributes:
        feature: the part of the table that it belongs to.
        batch, seq_q, seq_k, heads, heads_kv: sizes; with ``lengths`` of the longest sequence.
        causal, window: masks; a window of (left, 0) is causal.
        lengths: of packed sequences.
    """

    feature: str
    batch: int
    seq_q: int
    seq_k: int
    heads: int = HEADS
    heads_kv: int = HEADS
    causal: bool = False
    window: int | None = None
    lengths: tuple[int, ...] = ()

    def label(self) -> str:
        """For tables: ``b2 s8192 h32/8 window 512``."""
        heads = f"h{self.heads}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads else "")
        seq = f"s{self.seq_q}" + (f"x{self.seq_k}" if self.seq_k != self.seq_q else "")
        mask = f" window {self.window}" if self.window is not None else " causal" if self.causal else ""
        if self.lengths:
            seq = f"{len(self.lengths)} sequences, {sum(self.lengths)} tokens"
        return f"b{self.batch} {seq} {heads}{mask}"

    def flop(self) -> int:
        """FLOP of the visible pairs."""
        window = (self.window, 0 if self.causal or self.window is not None else None)
        sizes = [(n, n) for n in self.lengths] or [(self.seq_q, self.seq_k)] * self.batch
        pairs = sum(visible_pairs(q, k, window=window) for q, k in sizes)
        return attention_flop(1, self.heads, D_HEAD, pairs)

    def cache_bytes(self) -> int:
        """Bytes of K and V, which a single query reads once."""
        return 2 * self.batch * self.seq_k * self.heads_kv * D_HEAD * DTYPE.itemsize


PLAIN = Case("plain", 4, 4096, 4096, 16, 16)


def all_cases(scale: int = 1) -> Iterator[Case]:
    """Every row; ``scale`` divides all lengths, for quick runs."""
    tokens = TOKENS // scale
    for seq in (2048, 8192, 16384):
        n = seq // scale
        yield Case("causal", tokens // n, n, n, 16, 16)
        yield Case("causal", tokens // n, n, n, 16, 16, causal=True)
    for seq, window in itertools.product((8192, 16384), (512, 1024, 4096)):
        n = seq // scale
        yield Case("window", tokens // n, n, n, 16, 16, causal=True, window=window // scale)
    for seq in (2048, 8192):
        n = seq // scale
        yield Case("grouped heads", tokens // n, n, n, HEADS, HEADS_KV, causal=True)
    uneven = tuple(n // scale for n in (4096, 200, 1700, 64, 3000, 900, 2500, 33, 3891))
    even = (2048 // scale,) * 8
    for lengths in (uneven, even):
        n = max(lengths)
        yield Case("variable length", len(lengths), n, n, 16, 16, causal=True, lengths=lengths)
    for batch, thousands in itertools.product(CACHE_BATCHES, CACHE_LENGTHS):
        case = Case("decode", batch, 1, thousands * 1024 // scale, HEADS, HEADS_KV)
        if case.cache_bytes() <= CACHE_BYTES:
            yield case


# ---------------------------------------------------------------------- contestants
Call = Callable[[], Any]


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case: q, k, v (batch, seq, heads, d) or packed (total, heads, d), offsets where packed."""

    q: Tensor
    k: Tensor
    v: Tensor
    ends: Tensor | None


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Standard normal tensors."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(seq: int, heads: int) -> Tensor:
        shape = (sum(case.lengths),) if case.lengths else (case.batch, seq)
        return torch.randn(*shape, heads, D_HEAD, device=device, dtype=DTYPE, generator=generator)

    ends = None
    if case.lengths:
        ends = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=device)
    q, k, v = (
        normal(n, h)
        for n, h in ((case.seq_q, case.heads), (case.seq_k, case.heads_kv), (case.seq_k, case.heads_kv))
    )
    return Inputs(q, k, v, ends)


def own_call(case: Case, x: Inputs) -> Call:
    """The library's, as a user writes it."""
    from flash_attention import attention, attention_varlen

    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        options["window"] = (case.window, 0)
    if x.ends is not None:
        ends, longest = x.ends, case.seq_q
        return lambda: attention_varlen(x.q, x.k, x.v, ends, ends, longest, longest, **options)
    return lambda: attention(x.q, x.k, x.v, **options)


def sdpa_call(case: Case, x: Inputs) -> Call:
    """PyTorch's, whose mask for a single query is none at all.

    Raises:
        NotImplementedError: it has no such feature without a mask in memory.
    """
    if x.ends is not None or case.window is not None:
        raise NotImplementedError("no packed sequences, no windows")
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    options: dict[str, Any] = {"is_causal": case.causal, "enable_gqa": case.heads != case.heads_kv}
    return lambda: scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def package_call(module: str, case: Case, x: Inputs) -> Call:
    """FlashAttention-3 or -4 from an installed package.

    Raises:
        ModuleNotFoundError: not installed.
        TypeError: this version has other arguments.
    """
    if not _is_installed(module):
        raise ModuleNotFoundError(f"{module} is not installed")
    package = importlib.import_module(module)
    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        # Its right limit of None or -1 means no limit; causal has one.
        options["window_size"] = (case.window, 0)
    if x.ends is not None:
        ends, longest = x.ends, case.seq_q
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        function = package.flash_attn_varlen_func
    else:
        function = package.flash_attn_func

    def call() -> Tensor:
        result = function(x.q, x.k, x.v, **options)
        return result[0] if isinstance(result, tuple) else result

    return call


@dataclass(frozen=True)
class Contestant:
    """Somebody who is timed.

    Attributes:
        name: in rows.
        bind: makes the call; raises where it has no such feature.
        context: settings around the calls.
    """

    name: str
    bind: Callable[[Case, Inputs], Call]
    context: Callable[[], Any] = nullcontext


CONTESTANTS = (
    Contestant("ours", own_call),
    Contestant("fa2", sdpa_call, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    Contestant("cudnn", sdpa_call, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
    Contestant("fa3", lambda case, x: package_call("fa3_fwd_interface", case, x)),
    Contestant("fa4", lambda case, x: package_call("flash_attn.cute", case, x)),
)
ALL_CONTESTANTS = ",".join(contestant.name for contestant in CONTESTANTS)


# ---------------------------------------------------------------------- measuring
@dataclass
class FeatureRow:
    """The times of one case.

    Attributes:
        case: what was computed.
        milliseconds: by contestant.
        missing: why others have no time.
        kernel: what the library ran, and why.
        rate: of ours: TFLOP/s, or for a single query bytes of K and V a second.
    """

    case: Case
    milliseconds: dict[str, Timing] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    kernel: str = ""
    rate: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        times = {name: timing.to_json() for name, timing in self.milliseconds.items()}
        return {**asdict(self), "label": self.case.label(), "milliseconds": times}


def measure(case: Case, device: torch.device, names: Sequence[str]) -> FeatureRow:
    """Times all who can compute the case and agree about its result."""
    import flash_attention

    x, timer, row = make_inputs(case, device), timer_for(device), FeatureRow(case)
    calls: dict[str, TimedCall] = {}
    result: Tensor | None = None
    for contestant in CONTESTANTS:
        if contestant.name not in names:
            continue
        try:
            timed = TimedCall(contestant.bind(case, x), contestant.context)
            with timed.context():
                out = timed.call()
            if contestant.name == "ours":
                result, kernel = out, flash_attention.last_kernel()
                row.kernel = kernel.short_form() if kernel is not None else ""
            elif result is not None and (wrong := difference(out, result)):
                raise ValueError(wrong)
            timer.estimate(timed)
            calls[contestant.name] = timed
        except Exception as error:
            row.missing[contestant.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    # A cache is read from memory, not from L2, where the call before has left it.
    mode = "cold" if case.feature == "decode" and "cold" in timer.modes else "kernel"
    samples, failures = alternate(calls, timer.measure(mode), ROUNDS)
    row.missing |= {name: str(error) for name, error in failures.items()}
    row.milliseconds = {name: Timing.of(s, calls[name].launch_hidden) for name, s in samples.items()}
    if (own := row.milliseconds.get("ours")) is not None:
        work = case.cache_bytes() if case.feature == "decode" else case.flop()
        row.rate = work / (own.median * 1e-3)
    return row


def difference(out: Tensor, expected: Tensor) -> str | None:
    """How a peer's result differs by more than rounding, or None."""
    if out.shape != expected.shape:
        return f"its result has shape {tuple(out.shape)}, ours {tuple(expected.shape)}"
    return output_error(out, expected.float()).wrong_reason(DType.BF16)


def copy_rate(device: torch.device, n_bytes: int = COPY_BYTES) -> float:
    """Bytes that are read and written a second while a tensor is copied."""
    source = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    target, timer = torch.empty_like(source), timer_for(device)
    timed = TimedCall(lambda: target.copy_(source))
    timer.estimate(timed)
    samples, _ = alternate({"copy": timed}, timer.measure("kernel"), ROUNDS)
    return 2 * n_bytes / (Timing.of(samples["copy"]).median * 1e-3)


def with_windows(kernel: ForwardKernel) -> ForwardKernel:
    """The same configuration compiled for windows too."""
    return replace(kernel, traits=replace(kernel.traits, window=True))


def cost_of_windows(device: torch.device) -> dict[str, Any]:
    """Times of the plain kernel, and of the same configuration compiled for windows but given none.

    The difference is what plain calls would pay if one kernel served both. Empty on the CPU.
    """
    if device.type != "cuda":
        return {}
    from flash_attention import explain_choice
    from flash_attention.backends import cuda

    x = make_inputs(PLAIN, device)
    plain = explain_choice(x.q, x.k, x.v).kernel
    windowed = with_windows(plain)
    o, timer, unbounded = torch.empty_like(x.q), timer_for(device), cuda.Features(d_head_v=D_HEAD)
    calls = {
        "plain": TimedCall(lambda: cuda.forward(plain, x.q, x.k, x.v, o, None, D_HEAD**-0.5)),
        "windowed": TimedCall(
            lambda: cuda.forward(windowed, x.q, x.k, x.v, o, None, D_HEAD**-0.5, unbounded)
        ),
    }
    for timed in calls.values():
        timer.estimate(timed)
    samples, _ = alternate(calls, timer.measure("kernel"), 2 * ROUNDS)
    times = {name: Timing.of(values).to_json() for name, values in samples.items()}
    ratio = times["plain"]["median"] / times["windowed"]["median"]
    return {"kernel": plain.short_form(), **times, "plain_over_windowed": ratio}


def build_first(cases: Sequence[Case], device: torch.device) -> float:
    """Builds what the cases need, in parallel; gives the seconds that it took."""
    if device.type != "cuda":
        return 0.0
    from flash_attention import prepare
    from flash_attention.backends.cuda import device_facts_of
    from flash_attention.problem import AttentionProblem, visible_limits
    from flash_attention.select import select
    from flash_helpers.build import build_kernels

    begin, problems = time.perf_counter(), []
    for case in (PLAIN, *cases):
        window = (case.window, 0 if case.window is not None else None)
        left, right = visible_limits(case.causal, window, case.seq_q, case.seq_k)
        problems.append(
            AttentionProblem(
                DType.BF16, case.batch, case.seq_q, case.seq_k, case.heads, case.heads_kv, D_HEAD, D_HEAD,
                left, right, varlen=bool(case.lengths),
            )
        )  # fmt: skip
    facts = device_facts_of(device)
    kernels = [select(problem, facts, explained=False).kernel for problem in problems]
    build_kernels({*kernels, with_windows(kernels[0])}, [facts.target])
    prepare(problems, device)
    return time.perf_counter() - begin


# ---------------------------------------------------------------------- output
def table_of(rows: Sequence[FeatureRow], copied: float) -> Table:
    """A line a case: ours as a rate, the others as their time over ours."""
    names = [c.name for c in CONTESTANTS if any(c.name in row.milliseconds for row in rows)][1:]
    table = Table("feature", "problem", "ours, us", "rate", *(f"{name} / ours" for name in names))
    for row in rows:
        own = row.milliseconds.get("ours")
        if own is None:
            table.add_row(row.case.feature, row.case.label(), row.missing.get("ours", "not measured"))
            continue
        if row.case.feature == "decode":
            rate = f"{row.rate / 1e9:.0f} GB/s, {100 * row.rate / copied:.0f} % of a copy"
        else:
            rate = f"{row.rate / 1e12:.0f} TFLOP/s"
        ratios = [
            f"{row.milliseconds[name].median / own.median:.2f}" if name in row.milliseconds else "-"
            for name in names
        ]
        table.add_row(row.case.feature, row.case.label(), f"{1e3 * own.median:.1f}", rate, *ratios)
    return table


def run(
    out: Path, device: torch.device, seconds: float, names: Sequence[str], scale: int = 1
) -> list[FeatureRow]:
    """Measures, saving after each row, until the time is over; prints the table.

    Args:
        out: folder of ``features.json``.
        device: where.
        seconds: no row begins later; after 0.7 of them contestants that compile at first use are left out.
        names: of contestants.
        scale: divides all lengths.
    """
    begin, rows = time.monotonic(), []
    cases = list(all_cases(scale))
    document: dict[str, Any] = {"environment": environment(device), "rows": [], "skipped": []}
    document["build_seconds"] = build_first(cases, device)
    copied = copy_rate(device, COPY_BYTES // scale)
    document["copy_bytes_per_second"] = copied
    document["cost_of_windows"] = cost_of_windows(device)
    path = out / "features.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # What nobody else can say first: decoding and windows.
    for case in sorted(cases, key=lambda case: case.feature not in ("decode", "window")):
        passed = time.monotonic() - begin
        if passed > seconds:
            document["skipped"].append(case.label())
            continue
        here = [name for name in names if name not in COMPILING or passed < 0.7 * seconds]
        rows.append(measure(case, device, here))
        document["rows"].append(rows[-1].to_json())
        path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    console = Console(width=None if os.isatty(1) else 160)
    console.print(table_of(rows, copied))
    console.print(f"copy: {copied / 1e9:.0f} GB/s read and written", highlight=False)
    if cost := document["cost_of_windows"]:
        console.print(
            f"plain kernel / same compiled for windows: {cost['plain_over_windowed']:.4f}", highlight=False
        )
    missing = {f"{name}: {text}" for row in rows for name, text in row.missing.items()}
    for text in sorted(missing):
        console.print(f"missing  {text}", highlight=False, markup=False)
    console.print(
        f"{len(rows)} rows, {len(document['skipped'])} skipped, {time.monotonic() - begin:.0f} s; {path}",
        highlight=False,
    )
    return rows


def main(
    out: Annotated[Path, typer.Option(help="folder of features.json")] = Path("benchmarks/results"),
    seconds: Annotated[float, typer.Option(help="no row begins after this")] = 90.0,
    contestants: Annotated[str, typer.Option(help="names joined by commas")] = ALL_CONTESTANTS,
    scale: Annotated[int, typer.Option(help="divides all lengths, for quick runs")] = 1,
) -> None:
    """What each feature costs and gives, on the device that is there."""
    names = contestants.split(",")
    known = [c.name for c in CONTESTANTS]
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    run(out, default_device(), seconds, names, scale)


if __name__ == "__main__":
    typer.run(main)
