"""What ``flash-attention explain`` does."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from flash_helpers.build.loop_facts import built_facts
from flash_helpers.console.output import console_for, write_json
from flash_helpers.console.writable import check_file
from flash_helpers.explain.asked import Asked
from flash_helpers.explain.counters import counter_lines, find_ncu, measure
from flash_helpers.explain.explanation import Explanation, compile_facts, explain
from flash_helpers.explain.problem_explanation import (
    ProblemExplanation,
    explain_problem,
    notes,
    problem_table,
)
from flash_helpers.explain.render import diff_table, explanation_table
from flash_helpers.kernel_selection import parse_kernel
from flash_helpers.kernels.device_facts import KNOWN_DEVICES, DeviceFacts, device_facts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.traits import Traits
from flash_helpers.model.recorded import CompiledFacts
from flash_helpers.results.lookup import TuningResults
from flash_helpers.select.candidates import is_split
from flash_helpers.select.choice import check_head_size
from flash_helpers.select.no_kernel import no_kernel
from flash_helpers.select.select import select

OPTIONS = {"window": "--window LEFT,RIGHT"}  # that say a trait of another name
PADDED = "padded_head"  # the trait that no option says


def explain_command(
    kernel: str,
    diff: str | None = None,
    device: str = "H100",
    batch: int = 16,
    heads: int = 16,
    seq_len: int = 4096,
    causal: bool = False,
    compile_it: bool = False,
    json_path: Path | None = None,
    console: Console | None = None,
    *,
    asked: Asked | None = None,
    split: bool = False,
    ncu: bool = False,
) -> list[Explanation]:
    """Explains one kernel, or compares two, for any known device.

    Args:
        kernel, diff: short forms; ``(…): … | causal`` decides the mask, ``| split`` the split itself.
        device: short names joined by commas, or ``all``.
        batch, heads, seq_len, causal: the problem; dtype and head sizes are the configuration's.
        compile_it: compile for the device's target and read registers and machine code.
        json_path: write the explanations there.
        asked: the problem with all its features, in place of the four sizes.
        split: explain the kernel that cuts keys into parts.
        ncu: run the kernel on the GPU of this machine under the profiler and show its counters.

    Raises:
        ValueError: no such device or configuration, or a kernel with traits that the problem does not have.
        NotWritableError: ``json_path`` can't be written.
    """
    check_file(json_path)
    if ncu:
        find_ncu()  # before anything is compiled or shown
    console = console or console_for(json_path)
    asked = asked or Asked(batch, heads, seq_len, causal=causal)
    explanations = []
    for facts in _devices(device):
        pair = [
            _explain_one(text, facts, asked, split, compile_it) for text in (kernel, diff) if text is not None
        ]
        explanations += pair
        console.print(diff_table(*pair) if len(pair) == 2 else explanation_table(pair[0]))
        if (nothing := no_kernel(pair[0].problem)) is not None:
            console.print(f"{nothing.reason}; attention runs neither this one nor another", markup=False)
        if ncu:
            for explanation in pair:
                for line in counter_lines(explanation, measure(explanation)):
                    console.print(line, markup=False)
    write_json(json_path, [explanation.to_json() for explanation in explanations])
    return explanations


def explain_problem_command(
    device: str = "H100",
    dtype: str = "bf16",
    d_head: int = 128,
    batch: int = 16,
    heads: int = 16,
    seq_len: int = 4096,
    causal: bool = False,
    json_path: Path | None = None,
    console: Console | None = None,
    *,
    asked: Asked | None = None,
) -> list[ProblemExplanation]:
    """Shows which kernel a problem gets on a device, and why not the others.

    Args:
        device: short names joined by commas, or ``all``.
        dtype, d_head, batch, heads, seq_len, causal: the problem.
        json_path: write the explanations there.
        asked: the problem with all its features, in place of the sizes.

    Raises:
        ValueError: no such device or dtype, or a size below 1, or one that no tensor of ``attention`` has.
        flash_helpers.select.errors.NoKernelError: no kernel computes the problem.
        NotWritableError: ``json_path`` can't be written.
    """
    check_file(json_path)
    console = console or console_for(json_path)
    asked = asked or Asked(batch, heads, seq_len, causal=causal)
    if d_head < 1:
        raise ValueError(f"d_head is {d_head}; it must be at least 1")
    devices = _devices(device)
    check_head_size(d_head)
    check_head_size(asked.d_head_v or d_head)
    problem = asked.problem(DType.from_string(dtype), d_head, asked.d_head_v or d_head)
    results = TuningResults()
    explanations = []
    for facts in devices:
        measured = results.of(problem, facts)
        choice = no_kernel(problem) or select(problem, facts, results)
        explanation = explain_problem(problem, facts, choice, measured)
        explanations.append(explanation)
        console.print(problem_table(explanation))
        for line in notes(explanation):
            console.print(line, markup=False)
    write_json(json_path, [explanation.to_json() for explanation in explanations])
    return explanations


def _devices(device: str) -> list[DeviceFacts]:
    names = list(KNOWN_DEVICES) if device == "all" else device.split(",")
    return [device_facts(name.strip()) for name in dict.fromkeys(names)]


def _explain_one(text: str, facts: DeviceFacts, asked: Asked, split: bool, compile_it: bool) -> Explanation:
    kernel = parse_kernel(text, asked.causal)
    config, traits = kernel.config, kernel.traits
    if asked.d_head_v not in (0, config.d_head_v):
        raise ValueError(
            f"--d-head-v is {asked.d_head_v}, and the kernel has its own, {config.d_head_v}: leave it away"
        )
    asked = asked.of_kernel(traits.causal, direction_of(config).name)
    problem = asked.problem(config.dtype, config.d_head, config.d_head_v)
    explanation = explain(config, problem, facts, split=split or is_split(kernel))
    if wrong := _more_than(traits, explanation.kernel.traits):
        raise ValueError(
            f"{text!r} names {', '.join(wrong)}, which the problem does not have: {_advice(wrong)}"
        )
    compiled: CompiledFacts | None
    if compile_it:
        compiled = compile_facts(explanation.kernel, facts.target)
    else:
        compiled = built_facts(explanation.kernel, facts.target)
        known = explanation.compiled
        if compiled is not None and known is not None and _same(compiled, known):
            compiled = None  # the record says more: it has the main loop
    if compiled is None:
        return explanation
    return explain(config, problem, facts, compiled, split=is_split(explanation.kernel))


def _same(built: CompiledFacts, recorded: CompiledFacts) -> bool:
    return (built.registers, built.spill_bytes) == (recorded.registers, recorded.spill_bytes)


def _advice(traits: list[str]) -> str:
    """What to do about traits that the problem does not have."""
    options = [OPTIONS.get(name, f"--{name}") for name in traits if name != PADDED]
    advice = [f"give it as an option ({', '.join(options)}), or leave it away"] if options else []
    if PADDED in traits:
        advice.append(f"leave {PADDED} away, since a kernel is explained for tensors as wide as it is")
    return "; ".join(advice)


def _more_than(named: Traits, found: Traits) -> list[str]:
    """Traits that are named and not found. Tensors as narrow as the kernel need no padding."""
    return [name for name in vars(named) if getattr(named, name) and not getattr(found, name)]
