"""Thousands of random calls of ``attention`` and ``attention_cached`` against the float64 reference.

``python -m flash_helpers.test.random_cases --cases 2000 --device cuda --seed 0 --json FILE``; ``--gradients``
differentiates the calls.

On CUDA the cases are drawn for a bounded set of kernels of both families, which are built in parallel first:
nothing is compiled in between. A call either names the kernel's configuration or leaves the choice to the
library, which takes the best that is built (``FLASH_ATTENTION_JIT=0``) and warns of it. Calls that are
differentiated are drawn for kinds of calls (``random_gradients``). Several processes share the cases and the
GPU. Failures shrink, and each prints the one line that repeats it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from unittest import mock

import torch
import typer
from hypothesis import assume
from hypothesis import strategies as st

from flash_helpers.benchmark.runner import named_device
from flash_helpers.console.alone import run_alone
from flash_helpers.console.errors import shown_errors
from flash_helpers.console.writable import check_file
from flash_helpers.kernel_configs import (
    DeviceFacts,
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    choose_hopper_kernel,
)
from flash_helpers.kernels.ampere.forward.choices import choose_ampere_kernel
from flash_helpers.kernels.ampere.forward.decode import choose_ampere_decode_config
from flash_helpers.test import random_gradients
from flash_helpers.test.cases import LAYOUTS, Case
from flash_helpers.test.draws import (
    FEATURES,
    LENGTHS,
    LIMITS,
    MANY_KEYS,
    OFFSETS,
    PAGE_SIZES,
    SCALES,
    for_each,
)

if TYPE_CHECKING:
    from flash_attention.backward_call import BackwardCall
    from flash_helpers.select.chosen import Choice

PAGED_FEATURES = ("", "causal", "window", "causal sinks")
"""Those of ``FEATURES`` that caches in pages are drawn with."""


# ---------------------------------------------------------------------- kernels
def kernels_for(facts: DeviceFacts) -> list[ForwardKernel]:
    """The kernels that cases are drawn for: all features and head sizes, alternating between types."""
    found: list[ForwardKernel] = []
    for number, names in enumerate(FEATURES):
        dtype, other = (DType.FP16, DType.BF16) if number % 2 else (DType.BF16, DType.FP16)
        traits = ForwardTraits(**dict.fromkeys(names.split(), True))
        plain = FlashForwardKernelConfig(dtype, 64, 64, 64, 4, True, True, True, 0, 2, 2, False, True)
        found.append(ForwardKernel(plain, replace(traits, padded_head=True)))
        tuned, _ = choose_ampere_kernel(other, 128, traits.causal, 512, facts.capability, lse=True)
        found.append(ForwardKernel(tuned.config, traits))
        if facts.capability == (9, 0):
            for kind, d_head in ((dtype, 128), (other, 64)):
                found.append(choose_hopper_kernel(kind, d_head, False, 512, traits=traits)[0])
    for dtype in DType:
        ampere, _ = choose_ampere_kernel(dtype, 256, True, 512, facts.capability, lse=True)
        found.append(ForwardKernel(ampere.config, ForwardTraits(causal=True, padded_head=True)))
        plain128, _ = choose_ampere_kernel(dtype, 128, False, 512, facts.capability, lse=True)
        found.append(ForwardKernel(plain128.config))
        decode = choose_ampere_decode_config(dtype, 128, facts)
        found += [ForwardKernel(decode, ForwardTraits(split=cut)) for cut in (False, True)]
        if facts.capability == (9, 0):
            split, padded = ForwardTraits(split=True), ForwardTraits(padded_head=True)
            found.append(choose_hopper_kernel(dtype, 128, False, 1, traits=split)[0])
            found.append(choose_hopper_kernel(dtype, 128, False, 512, traits=padded)[0])
            found.append(choose_hopper_kernel(dtype, 256, True, 512, traits=padded)[0])
            found.append(choose_hopper_kernel(dtype, 192, False, 512, d_head_v=128)[0])
    found += _paged_kernels(facts)
    return [kernel for kernel in dict.fromkeys(found) if kernel.config.infeasible_reason(facts) is None]


def _paged_kernels(facts: DeviceFacts) -> list[ForwardKernel]:
    """For caches in pages, at head sizes of 64 and 128."""
    found: list[ForwardKernel] = []
    for number, names in enumerate(PAGED_FEATURES):
        dtype, other = (DType.FP16, DType.BF16) if number % 2 else (DType.BF16, DType.FP16)
        traits = ForwardTraits(varlen=True, paged=True, **dict.fromkeys(names.split(), True))
        plain = FlashForwardKernelConfig(dtype, 64, 64, 64, 4, True, True, True, 0, 2, 2, False, True)
        found.append(ForwardKernel(plain, replace(traits, padded_head=True)))
        tuned, _ = choose_ampere_kernel(other, 128, traits.causal, 512, facts.capability, lse=True)
        found.append(ForwardKernel(tuned.config, traits))
        if facts.capability == (9, 0):
            found.append(choose_hopper_kernel(other, 128, False, 512, traits=traits)[0])
    for dtype in DType:
        decode = choose_ampere_decode_config(dtype, 128, facts)
        for names in ("", "causal"):
            traits = ForwardTraits(varlen=True, paged=True, causal=bool(names))
            whole, _ = choose_ampere_kernel(dtype, 128, traits.causal, 512, facts.capability, lse=True)
            found.append(ForwardKernel(whole.config, traits))
            found += [ForwardKernel(decode, replace(traits, split=cut)) for cut in (False, True)]
            if facts.capability == (9, 0):
                split = replace(traits, split=True)
                found.append(choose_hopper_kernel(dtype, 128, False, 1, traits=split)[0])
    return found


# ---------------------------------------------------------------------- cases
@dataclass(frozen=True, repr=False)
class KernelSet:
    """What random calls may run.

    Attributes:
        built: the kernels that are there.
        wanted: those of them that cases are drawn for.
    """

    built: Sequence[ForwardKernel]
    wanted: Sequence[ForwardKernel]


@st.composite
def cases(draw: st.DrawFn, kernels: KernelSet | None = None, gradients: bool = False) -> Case:
    """A case for one of the kernels; without kernels any that the CPU backend takes.

    Args:
        kernels: what may run.
        gradients: without kernels: the case is differentiated; keys in pages have no gradient.
    """
    kernel = None
    if kernels is not None:
        kernel = kernels.wanted[draw(st.integers(0, len(kernels.wanted) - 1))]
    traits = kernel.traits if kernel is not None else ForwardTraits()

    def has(feature: str) -> bool:
        return draw(st.booleans()) if kernel is None else getattr(traits, feature)

    layouts = st.sampled_from(LAYOUTS)
    if kernel is None:
        d_head = 8 * draw(st.integers(1, 32))
        d_head_v = d_head if draw(st.booleans()) else 8 * draw(st.integers(1, 32))
    else:
        d_head = kernel.config.d_head
        d_head_v = kernel.config.d_head_v
        if traits.padded_head:  # not as narrow as the next smaller kernel takes
            d_head = d_head - 8 * draw(st.integers(1, 3))
            d_head_v = 8 * draw(st.integers(1, d_head_v // 8))
    split, windowed = traits.split, has("window")
    case = Case(
        dtype=draw(st.sampled_from(DType)) if kernel is None else kernel.config.dtype,
        batch=draw(st.integers(0, 3)),
        # A causal mask over one query hides nothing.
        seq_len_q=1 + traits.causal * draw(st.integers(1, 8)) if split else draw(LENGTHS),
        seq_len_k=draw(MANY_KEYS if split else LENGTHS),
        n_heads_kv=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        d_head=d_head,
        d_head_v=d_head_v,
        causal=has("causal"),
        window=(draw(LIMITS), draw(LIMITS)) if windowed else (None, None),
        softmax_scale=draw(st.sampled_from(SCALES)),
        softcap=draw(st.sampled_from((1.0, 20.0))) if has("softcap") else 0.0,
        sinks=has("sinks"),
        magnitude=draw(st.sampled_from((1.0, 1.0, 0.0, 4.0))),
        layouts=(draw(layouts), draw(layouts), draw(layouts)),
        seed=draw(st.integers(0, 3)),
        # A split kernel is the library's choice for few queries; one that is named takes all keys in one go.
        config=kernel.config.short_form() if kernel and not split and draw(st.booleans()) else "",
        diagonal_offset=draw(OFFSETS) if windowed else 0,
    )
    if gradients:
        case = replace(case, gradients=True, config="")
    elif traits.paged if kernel is not None else draw(st.booleans()) and draw(st.booleans()):
        case = _in_pages(draw, case)
    if kernel is not None and kernels is not None:
        assume(_is_built_for(case, kernel if case.config else None, kernels.built))
    return case


def _in_pages(draw: st.DrawFn, case: Case) -> Case:
    """The same with a cache of about as many keys as k and v."""
    page_size = draw(PAGE_SIZES)
    capacity = max(1, -(-case.seq_len_k // page_size)) * page_size
    # Counts beyond the capacity are cut down to it. Pages that are all one have no key of their own.
    used = tuple(draw(st.integers(0, capacity + 5)) for _ in range(case.batch))
    q, *kv = case.layouts
    k, v = (name.replace("one_batch", "contiguous") for name in kv)
    return replace(case, seq_len_k=capacity, page_size=page_size, used=used, layouts=(q, k, v))


def _is_built_for(case: Case, named: ForwardKernel | None, kernels: Sequence[ForwardKernel]) -> bool:
    """Whether the call runs without compiling: masks that hide nothing ask for another kernel.

    Args:
        case: the call.
        named: the kernel whose configuration it names; None: any will do.
        kernels: all that are built.
    """
    from flash_helpers.select.candidates import kernel_for, unable_reason

    problem = case.problem
    if named is None:
        problem = problem.with_rows_packed()
    # Chosen for keys in parts alone; where these are too few, another kernel takes them in one go.
    for_parts = {kernel.config for kernel in kernels if kernel.traits.split}
    able = [named] if named else [kernel for kernel in kernels if kernel.config not in for_parts]
    configs = [kernel.config for kernel in able]
    return any(
        unable_reason(kernel.config, problem, configs) is None
        and kernel_for(kernel.config, problem) == kernel
        for kernel in able
    )


def run_cases(source: st.SearchStrategy[Case], device: str, n: int, seed: int) -> dict[str, Any]:
    """Checks ``n`` cases in this process.

    Returns:
        ``cases``: how many were checked, ``kernels``: how often each kernel ran, those of gradients too,
        ``failures``: the message of the smallest one found, if any, the last line of which repeats it.
    """
    import flash_attention
    from flash_attention.devices import backend, backward_backend

    done, ran, latest = 0, Counter[str](), None
    backward = backend(backward_backend(device.partition(":")[0]))
    run_backward = backward.run_backward

    def noted(call: BackwardCall, choice: Choice) -> Any:
        ran[choice.kernel.short_form()] += 1
        return run_backward(call, choice)

    def check(case: Case) -> None:
        nonlocal done, latest
        latest = case  # after a failure hypothesis ends with the smallest case
        case.check(device)
        done += 1
        kernel = flash_attention.last_kernel()
        ran[kernel.short_form() if kernel is not None else "none"] += 1

    failures = []
    try:
        with mock.patch.object(backward, "run_backward", noted):
            for_each(source, n, seed, check)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if latest is not None and not isinstance(error, AssertionError):
            text += f"\n{latest.repeat_command(device)}"
        failures = [text]
    return {"cases": done, "kernels": dict(ran), "failures": failures}


# ---------------------------------------------------------------------- processes
def build_all(device: str) -> tuple[list[ForwardKernel], float]:
    """Builds the kernels of a CUDA device that calls are drawn for, in parallel; they, and the seconds."""
    if not device.startswith("cuda"):
        return [], 0.0
    from flash_attention.backends.cuda import device_facts_of
    from flash_helpers.build import build_kernels

    begin = time.perf_counter()
    facts = device_facts_of(device)
    kernels = kernels_for(facts)
    build_kernels(kernels, [facts.target])
    return kernels, time.perf_counter() - begin


def build_for_gradients(device: str, shares: Sequence[tuple[int, int]]) -> float:
    """Builds, in parallel, what differentiated calls take on a CUDA device; the seconds.

    Args:
        shares: number of calls and seed of each process.
    """
    if not device.startswith("cuda"):
        return 0.0
    from flash_attention.backends.cuda import device_facts_of
    from flash_helpers.build import build_kernels

    begin = time.perf_counter()
    facts, drawn = device_facts_of(device), list[Case]()
    for first, (n, seed) in enumerate(shares):
        for_each(random_gradients.share(first, len(shares), facts), n, seed, drawn.append)
    build_kernels(random_gradients.kernels_of(drawn, facts), [facts.target])
    return time.perf_counter() - begin


def shares_of(n: int, seed: int, workers: int) -> list[tuple[int, int]]:
    """How many of n calls each process checks, and its seed."""
    return [(n // workers + (worker < n % workers), seed + worker) for worker in range(workers)]


def run_workers(
    device: str, n: int, seed: int, workers: int, timeout: float, gradients: bool = False
) -> list[dict[str, Any]]:
    """Shares ``n`` cases among processes, each with a seed of its own. One that dies is a failure."""
    command = [sys.executable, "-m", "flash_helpers.test.random_cases", "--device", device, "--workers", "0"]
    command += ["--gradients"] * gradients
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    if not gradients:
        environment["FLASH_ATTENTION_JIT"] = "0"
    results = []
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for worker, (share, own_seed) in enumerate(shares_of(n, seed, workers)):
            path = Path(folder) / f"{worker}.json"
            arguments = ["--cases", str(share), "--seed", str(own_seed), "--json", str(path)]
            arguments += ["--share", f"{worker}/{workers}"]
            running.append((subprocess.Popen([*command, *arguments], env=environment), path, own_seed))
        deadline = time.monotonic() + timeout
        for process, path, used_seed in running:
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if path.exists():
                results.append(json.loads(path.read_text(encoding="utf-8")))
            else:
                text = f"the process with seed {used_seed} ended with code {code} and no result"
                results.append({"cases": 0, "kernels": {}, "failures": [text]})
    return results


def read_share(text: str) -> tuple[int, int]:
    """i and n of ``i/n``.

    Raises:
        ValueError: no such text, or an i outside of 0 to n - 1.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not int(match[1]) < int(match[2]):
        raise ValueError(f"share is {text!r}; it must be i/n with i from 0 to n - 1, such as 0/1")
    return int(match[1]), int(match[2])


@shown_errors()
def main(
    n_cases: Annotated[int, typer.Option("--cases", help="calls to check")] = 2000,
    device: Annotated[str, typer.Option(help="cuda or cpu")] = "cuda" if torch.cuda.is_available() else "cpu",
    seed: Annotated[int, typer.Option(help="of the draws; each process adds its number")] = 0,
    workers: Annotated[int, typer.Option(help="processes; 0: this one alone")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the result is written")] = None,
    timeout: Annotated[float, typer.Option(help="seconds for all cases")] = 300.0,
    share: Annotated[str, typer.Option(help="i/n: draw for every n-th kernel from number i on")] = "0/1",
    gradients: Annotated[bool, typer.Option("--gradients", help="differentiate the calls")] = False,
) -> None:
    """Random calls of attention against the float64 reference."""
    begin = time.perf_counter()
    if n_cases < 1 or workers < 0:
        raise ValueError(f"cases is {n_cases} and workers {workers}; they must be at least 1 and 0")
    named_device(device)
    check_file(json_file)
    first, step = read_share(share)
    workers, kernels = min(workers, n_cases), list[ForwardKernel]()
    if not gradients:
        kernels, build_seconds = build_all(device)
    else:  # processes that share the work find all built
        build_seconds = build_for_gradients(device, shares_of(n_cases, seed, workers))
    if workers:
        parts = run_workers(device, n_cases, seed, workers, timeout, gradients)
    else:
        chosen = KernelSet(kernels, kernels[first::step]) if kernels else None
        source = cases(chosen, gradients)
        if gradients and device.startswith("cuda"):
            from flash_attention.backends.cuda import device_facts_of

            source = random_gradients.share(first, step, device_facts_of(device))
        parts = [run_cases(source, device, n_cases, seed)]
    ran = sum((Counter(part["kernels"]) for part in parts), Counter[str]())
    result = {
        "cases": sum(part["cases"] for part in parts),
        "seconds": time.perf_counter() - begin,
        "build_seconds": build_seconds,
        "seed": seed,
        "device": device,
        "kernels": dict(ran.most_common()),
        "failures": [text for part in parts for text in part["failures"]],
    }
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1), encoding="utf-8")
    if workers:
        for text in result["failures"]:
            print(text)
        print(
            f"{result['cases']} cases on {device} in {result['seconds']:.1f} s, {build_seconds:.1f} s "
            f"of them building; {len(ran)} kernels, {len(result['failures'])} failures"
        )
        raise SystemExit(1 if result["failures"] else 0)


if __name__ == "__main__":
    run_alone(main)
