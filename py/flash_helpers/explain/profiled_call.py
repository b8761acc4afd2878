"""The call that runs under the profiler: one kernel on one problem, on random numbers."""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    """``python -c … SHORT_FORM PROBLEM``; the problem as JSON, as ``Explanation.to_json`` writes it."""
    import torch

    from flash_attention import attention
    from flash_helpers.kernel_selection import parse_kernel
    from flash_helpers.kernels.dtype import DType

    name, problem = sys.argv[1], json.loads(sys.argv[2])
    if on := [feature for feature in ("varlen", "cached", "paged") if problem[feature]]:
        raise SystemExit(f"--ncu profiles dense calls; this problem has {', '.join(on)}: leave these away")
    if problem["direction"] != "forward":
        raise SystemExit("--ncu profiles forward kernels alone: leave it away, and time gradients by bench")
    kernel = parse_kernel(name, False)
    if kernel.traits.split:
        raise SystemExit("--ncu profiles kernels that take all keys in one go: leave --split away")
    dtype = DType.from_string(problem["dtype"]).to_torch_dtype()

    def tensor(length: int, heads: int, columns: int) -> torch.Tensor:
        return torch.randn(problem["batch"], length, heads, columns, dtype=dtype, device="cuda")

    q = tensor(problem["seq_len_q"], problem["n_heads"], problem["d_head"])
    k = tensor(problem["seq_len_k"], problem["n_heads_kv"], problem["d_head"])
    v = tensor(problem["seq_len_k"], problem["n_heads_kv"], problem["d_head_v"])
    options: dict[str, Any] = {"window": (problem["left"], problem["right"]), "config": kernel.config}
    if problem["softcap"]:
        options["softcap"] = 30.0
    if problem["sinks"]:
        options["sinks"] = torch.zeros(problem["n_heads"], device="cuda")
    attention(q, k, v, **options)
    torch.cuda.synchronize()
