"""What ``flash-attention explain`` does."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from flash_helpers.commands.output import console_for, write_json
from flash_helpers.commands.writable import check_file
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
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.problem import Problem


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
) -> list[Explanation]:
    """Explains one configuration, or compares two, for any known device.

    Args:
        kernel, diff: short forms; one that names its traits, ``(…): … | causal``, decides the mask itself.
        device: short names joined by commas, or ``all``.
        batch, heads, seq_len, causal: the problem; dtype and d_head are the configuration's.
        compile_it: compile for the device's target and read registers and machine code.
        json_path: write the explanations there.

    Raises:
        ValueError: no such device or configuration, or one with traits that are not predicted.
        NotWritableError: ``json_path`` can't be written.
    """
    check_file(json_path)
    console = console or console_for(json_path)
    explanations = []
    for facts in _devices(device):
        pair = [
            _explain_one(text, facts, batch, heads, seq_len, causal, compile_it)
            for text in (kernel, diff)
            if text is not None
        ]
        explanations += pair
        console.print(diff_table(*pair) if len(pair) == 2 else explanation_table(pair[0]))
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
) -> list[ProblemExplanation]:
    """Shows which kernel a problem gets on a device, and why not the others.

    Args:
        device: short names joined by commas, or ``all``.
        dtype, d_head, batch, heads, seq_len, causal: the problem.
        json_path: write the explanations there.

    Raises:
        ValueError: no such device or dtype, or a size that is none or that no tensor of ``attention`` has.
        flash_attention.errors.NoKernelError: no kernel computes the problem.
        NotWritableError: ``json_path`` can't be written.
    """
    check_file(json_path)
    console = console or console_for(json_path)
    problem = Problem(DType.from_string(dtype), batch, heads, seq_len, d_head, causal)
    devices = _devices(device)

    from flash_helpers.results.lookup import TuningResults
    from flash_helpers.select.choice import attention_problem, check_head_size, choose

    check_head_size(d_head)
    results = TuningResults()
    explanations = []
    for facts in devices:
        measured = results.of(attention_problem(problem), facts)
        explanation = explain_problem(problem, facts, choose(problem, facts, results), measured)
        explanations.append(explanation)
        console.print(problem_table(explanation))
        for line in notes(explanation):
            console.print(line, markup=False)
    write_json(json_path, [explanation.to_json() for explanation in explanations])
    return explanations


def _devices(device: str) -> list[DeviceFacts]:
    names = list(KNOWN_DEVICES) if device == "all" else device.split(",")
    return [device_facts(name.strip()) for name in dict.fromkeys(names)]


def _explain_one(
    text: str, facts: DeviceFacts, batch: int, heads: int, seq_len: int, causal: bool, compile_it: bool
) -> Explanation:
    kernel = parse_kernel(text, causal)
    if (more := kernel.traits) != ForwardTraits(causal=more.causal):
        raise ValueError(
            f"{text!r} has more traits than causal, which change its registers and its work in ways that are "
            f"not predicted: explain {kernel.config.short_form()!r}"
        )
    config, causal = kernel.config, kernel.traits.causal
    problem = Problem(config.dtype, batch, heads, seq_len, config.d_head, causal)
    compiled = None
    if compile_it:
        compiled = compile_facts(ForwardKernel(config, ForwardTraits(causal=causal)), facts.target)
    return explain(config, problem, facts, compiled)
