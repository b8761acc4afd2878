"""What ``flash-attention explain`` does."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich.console import Console

from flash_helpers.configs.device_facts import KNOWN_DEVICES, DeviceFacts, device_facts
from flash_helpers.configs.kernel import ForwardKernel
from flash_helpers.configs.traits import ForwardTraits
from flash_helpers.explain.explanation import Explanation, compile_facts, explain
from flash_helpers.explain.render import diff_table, explanation_table
from flash_helpers.kernel_selection import parse_short_form
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
        kernel, diff: short forms.
        device: short names joined by commas, or ``all``.
        batch, heads, seq_len, causal: the problem; dtype and d_head are the configuration's.
        compile_it: compile for the device's target and read registers and machine code.
        json_path: write the explanations there.

    Raises:
        ValueError: no such device or configuration.
    """
    console = console or Console(width=None if os.isatty(1) else 140)
    names = list(KNOWN_DEVICES) if device == "all" else device.split(",")
    explanations = []
    for facts in map(device_facts, names):
        pair = [
            _explain_one(text, facts, batch, heads, seq_len, causal, compile_it)
            for text in (kernel, diff)
            if text is not None
        ]
        explanations += pair
        console.print(diff_table(*pair) if len(pair) == 2 else explanation_table(pair[0]))
    if json_path is not None:
        json_path.write_text(json.dumps([e.to_json() for e in explanations], indent=1) + "\n")
    return explanations


def _explain_one(
    text: str, facts: DeviceFacts, batch: int, heads: int, seq_len: int, causal: bool, compile_it: bool
) -> Explanation:
    config = parse_short_form(text)
    problem = Problem(config.dtype, batch, heads, seq_len, config.d_head, causal)
    compiled = None
    if compile_it:
        compiled = compile_facts(ForwardKernel(config, ForwardTraits(causal=causal)), facts.target)
    return explain(config, problem, facts, compiled)
