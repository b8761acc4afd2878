"""Examples for the help of each command of ``flash-attention``."""

from __future__ import annotations

KERNEL = "(FP16, 128, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+opt_softmax"

EXAMPLES: dict[str, tuple[str, ...]] = {
    "bench": (
        "flash-attention bench",
        "flash-attention bench 4096,16384 64,128 --dtype bf16 --causal both --json bench.json",
        "flash-attention bench 4096 128 --kernels ladder --peers fa2,cudnn",
    ),
    "explain": (
        "flash-attention explain --device H100 --seq-len 8192 --causal",
        f'flash-attention explain "{KERNEL}" --device A100',
    ),
    "tune": (
        "flash-attention tune 4096,8192 128 --dtype bf16 --budget 300",
        "flash-attention tune --budget 0 --export my-tables/",
    ),
    "ladder": (
        "flash-attention ladder",
        "flash-attention ladder --family hopper --d-head 64,128 --causal both --out ladder",
    ),
    "configs": (
        "flash-attention configs ladder --device A100",
        "flash-attention configs --dtype bf16 --d-head 128 --words eager,buffer",
    ),
    "build": (
        "flash-attention build ladder --target 80,90",
        f'flash-attention build "{KERNEL}" --causal both --target 80',
    ),
    "doctor": ("flash-attention doctor", "flash-attention doctor --json -"),
    "cache": ("flash-attention cache", "flash-attention cache list", "flash-attention cache clear"),
    "report": (
        "flash-attention report bench.json --out report",
        "flash-attention report bench.json ladder/ladder.json --mode paused --readme README.md",
    ),
}


def examples(command: str) -> str:
    """The end of a command's help. ``\\b`` keeps click from joining the lines."""
    lines = "\n".join(f"  {line}" for line in EXAMPLES[command])
    return f"\b\nExamples:\n{lines}"
