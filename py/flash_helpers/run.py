"""The library's main job in one command: attention with a named configuration, checked and timed.

``python -m flash_helpers.run`` computes attention on the GPU that is there, or on the CPU, at several
sizes; compares each result with the float64 reference; prints error, time and TFLOP/s.
"""

from __future__ import annotations

import statistics
import sys

import torch
from rich.console import Console
from rich.table import Table

import flash_attention
from flash_helpers.kernel_configs import parse_kernel_name_into_config
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.test.utils import QKVConfig, error_stats, generate_qkv, py_flash_attention, reference

KERNEL = "(BF16, 128, 128, 64, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax"
SIZES = {
    "cpu": ((1, 128, 4), (1, 512, 8), (2, 1024, 8)),
    "cuda": ((1, 512, 8), (4, 2048, 16), (16, 4096, 16)),
}
REPEATS = {"cpu": 3, "cuda": 10}
REFERENCE_HEADS = 2  # the float64 reference of a large problem is computed for its first heads only


def run_size(cfg: ForwardConfig, batch: int, seq_len: int, heads: int, device: str) -> list[str]:
    """One row of the table; the last cell is ``ok`` or ``WRONG``.

    Right means: at most twice the error that PyTorch makes in the same precision.
    """
    q, k, v = generate_qkv(
        QKVConfig(
            batch=batch, seq_len=seq_len, n_heads=heads, d_head=cfg.d_head, dtype=cfg.dtype, device=device
        )
    )
    runs = [flash_attention.forward_timed(cfg, q, k, v) for _ in range(REPEATS[device])]
    milliseconds = statistics.median(ms for _, ms in runs)
    q, k, v = (x[:1, :, :REFERENCE_HEADS] for x in (q, k, v))
    expected, _ = reference(q, k, v)
    error = error_stats(runs[-1][0][:1, :, :REFERENCE_HEADS], expected)
    same_precision = error_stats(py_flash_attention(q, k, v), expected)
    right = error.max_abs <= 2 * same_precision.max_abs + 1e-5
    tflops = cfg.attn_flop(batch, heads, seq_len) / milliseconds / 1e9
    return [
        f"({batch}, {seq_len}, {heads}, {cfg.d_head})",
        f"{error.max_abs:.1e}",
        f"{same_precision.max_abs:.1e}",
        f"{milliseconds:.3f}",
        f"{tflops:.3g}",
        "ok" if right else "WRONG",
    ]


def main() -> int:
    """Runs every size; 1 if a result was wrong."""
    cfg = parse_kernel_name_into_config(KERNEL)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    table = Table("(batch, seq, heads, d_head)", "max error", "PyTorch's", "ms", "TFLOP/s", "")
    rows = [run_size(cfg, *size, device) for size in SIZES[device]]
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(f"device  {where}\nkernel  {cfg.short_form()}", highlight=False)
    console.print("error   against the float64 reference; PyTorch's is eager attention in the same precision")
    console.print(table)
    return int(any(row[-1] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
