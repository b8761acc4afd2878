"""FlashAttention-3's gradients at head size 256, in a process of its own.

    python benchmarks/fa3_backward.py --library libdew_flash_attn3.so --json fa3-backward.json

Its kernels are taken from ``dew-flash-attn-cu13``, which calls them through JAX (``pip install jax[cuda13]
dew-flash-attn-cu13``); the library lies in that package. The package ``fa3-fwd`` has no backward pass. The
gradients are compared with JAX's own in float32 first, of small tensors. A time is the wall clock of calls
that are queued behind each other, over their number.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.benchmark.results import BENCHMARKS

BENCHMARK = "fa3_backward"
METHOD = (
    "gradients of small tensors are compared with a float32 reference first; times are the wall clock of "
    "calls that are queued behind each other, in a process of its own, medians over rounds"
)
D_HEAD, TOKENS, HIDDEN = 256, 16384, 2048
LENGTHS = (512, 4096, 16384)
TOLERANCE = 1.6e-2  # relative, as of the other benchmarks
CALLS_SECONDS = 12e-3  # about so long is one measurement


def passes(library: Path) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward pass, as functions of JAX arrays and of the mask."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp

    loaded = ctypes.cdll.LoadLibrary(str(library))
    for name in ("_fwd", "_bwd"):
        capsule = jax.ffi.pycapsule(getattr(loaded, f"dew_flash3_mha{name}"))
        jax.ffi.register_ffi_target(f"dew_flash3_mha{name}", capsule, platform="CUDA")
    shape_of: Any = jax.ShapeDtypeStruct

    def options(causal: bool) -> dict[str, Any]:
        windows = {"window_size_left": np.int64(-1), "window_size_right": np.int64(-1)}
        return {"softmax_scale": np.float64(1 / math.sqrt(D_HEAD)), "is_causal": causal, **windows}

    def forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
        batch, seq, heads, _ = q.shape
        unused = (shape_of((1, 1, 1, 1), jnp.float32), shape_of((1, 1, 1), jnp.float32))
        results = (shape_of(q.shape, q.dtype), shape_of((batch, heads, seq), jnp.float32), *unused)
        return jax.ffi.ffi_call("dew_flash3_mha_fwd", results)(q, k, v, **options(causal))[:2]

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool) -> Any:
        batch, seq, heads, _ = q.shape
        work = shape_of((heads * (batch * seq + 128 * (batch + 1)),), jnp.float32)
        results = (*(shape_of(x.shape, x.dtype) for x in (q, k, v)), work, work)
        call = jax.ffi.ffi_call("dew_flash3_mha_bwd", results)
        return call(dout, q, k, v, out, lse, **options(causal))[:3]

    return jax.jit(forward, static_argnums=3), jax.jit(backward, static_argnums=6)


def inputs(batch: int, seq: int, heads: int) -> list[Any]:
    """q, k, v and the gradient of the output, standard normal."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(seq), 4)
    return [jax.random.normal(key, (batch, seq, heads, D_HEAD), jnp.bfloat16) for key in keys]


def error(forward: Callable[..., Any], backward: Callable[..., Any], causal: bool) -> float:
    """The largest relative error of the three gradients, of two items of 256 rows."""
    import jax
    import jax.numpy as jnp

    q, k, v, dout = inputs(2, 256, 2)
    out, lse = forward(q, k, v, causal)
    found = backward(dout, q, k, v, out, lse, causal)

    def reference(q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") / math.sqrt(D_HEAD)
        if causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v, precision="highest")

    _, pull = jax.vjp(reference, *(x.astype(jnp.float32) for x in (q, k, v)))
    right = pull(dout.astype(jnp.float32))
    norm = jnp.linalg.norm
    return max(
        float(norm((x.astype(jnp.float32) - y).ravel()) / norm(y.ravel()))
        for x, y in zip(found, right, strict=True)
    )


def milliseconds(
    forward: Callable[..., Any], backward: Callable[..., Any], seq: int, causal: bool, rounds: int
) -> list[float]:
    """Times of one backward pass, one a round."""
    import jax

    batch, heads = TOKENS // seq, HIDDEN // D_HEAD
    q, k, v, dout = inputs(batch, seq, heads)
    out, lse = forward(q, k, v, causal)
    flop = 10 * batch * heads * seq * seq * D_HEAD // (2 if causal else 1)
    calls = max(3, min(30, int(CALLS_SECONDS / (flop / 400e12))))
    jax.block_until_ready(backward(dout, q, k, v, out, lse, causal))
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            found = backward(dout, q, k, v, out, lse, causal)
        jax.block_until_ready(found)
        times.append(1e3 * (time.perf_counter() - begin) / calls)
    return times


def row(seq: int, causal: bool, wrong: float, times: list[float]) -> dict[str, Any]:
    """A row of the result file."""
    heads = HIDDEN // D_HEAD
    problem = {
        "dtype": "BF16", "batch": TOKENS // seq, "n_heads": heads, "n_heads_kv": heads, "seq_len_q": seq,
        "seq_len_k": seq, "d_head": D_HEAD, "causal": causal,
    }  # fmt: skip
    made = {
        "implementation": "fa3", "kind": "peer", "problem": problem, "direction": "backward", "error": wrong,
    }  # fmt: skip
    if not wrong <= TOLERANCE:
        reason = f"relative error {wrong:.3g}, allowed {TOLERANCE:.3g}"
        return {**made, "milliseconds": {}, "status": "wrong", "reason": reason}
    p20, median, p80 = (float(f"{x:.7g}") for x in np.percentile(times, [20, 50, 80]))
    timing = {"median": median, "p20": p20, "p80": p80, "rounds": len(times)}
    return {**made, "milliseconds": {"call": timing}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", type=Path, required=True, help="libdew_flash_attn3.so")
    parser.add_argument("--json", type=Path, required=True, help="result file")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    forward, backward = passes(given.library)
    rows = []
    for causal in (False, True):
        wrong = error(forward, backward, causal)
        for seq in LENGTHS:
            times = milliseconds(forward, backward, seq, causal, given.rounds)
            rows.append(row(seq, causal, wrong, times))
            print(
                f"{seq}{', causal' if causal else ''}: {statistics.median(times):.3f} ms, error {wrong:.3g}"
            )
    # PyTorch is asked for the card's facts when nothing is timed any more.
    import jax
    import torch

    from flash_helpers.benchmark.environment import environment

    facts = {"jax": jax.__version__, "library": given.library.name}
    file = ResultFile(
        BENCHMARK,
        BENCHMARKS[BENCHMARK],
        rows,
        environment(torch.device("cuda")),
        facts,
        "backward",
        method=METHOD,
    )
    file.save(given.json)


if __name__ == "__main__":
    main()
