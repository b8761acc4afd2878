"""Equal calls give equal bits beside other work, are captured from the first one on, and keep nothing."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from repeated_gradients import CASES, HEAD_SIZES

from flash_attention import attention, attention_varlen, explain_choice, prepare
from flash_attention.call import problem_of
from flash_helpers import build
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.family import Family
from flash_helpers.kernels.problem import BACKWARD

RUNS = 100
SHAPES = {  # batch, queries, keys, query heads, kv heads, options
    "plain": (2, 1024, 1024, 8, 8, {}),
    "causal": (2, 2000, 2000, 8, 2, {"causal": True}),
    "window": (1, 1500, 1500, 8, 2, {"causal": True, "window": (256, 0)}),
    "decode": (2, 1, 20000, 32, 8, {}),
    "few queries": (1, 100, 9000, 4, 4, {}),
}


def inputs(batch: int, seq_q: int, seq_k: int, heads: int, heads_kv: int, d: int = 128) -> list[torch.Tensor]:
    """q, k and v."""
    generator = torch.Generator("cuda").manual_seed(seq_q + seq_k)
    shapes = ((batch, seq_q, heads, d), (batch, seq_k, heads_kv, d), (batch, seq_k, heads_kv, d))
    return [torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) for shape in shapes]


class OtherWork:
    """Keeps part of the GPU busy from another stream, with more work than a test takes."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.a, self.b = (torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.stream.wait_stream(torch.cuda.current_stream())

    def enqueue(self, products: int = 4) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(products):
                torch.mm(self.a, self.b)


@pytest.mark.parametrize("name", SHAPES)
def test_equal_bits_beside_other_work(name: str) -> None:
    *sizes, options = SHAPES[name]
    q, k, v = inputs(*sizes)
    expected = attention(q, k, v, return_lse=True, **options)
    torch.cuda.synchronize()
    other = OtherWork()
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(RUNS):
        other.enqueue()
        for result, first in zip(attention(q, k, v, return_lse=True, **options), expected, strict=True):
            differ += (result != first).sum()
    assert differ.item() == 0


def test_equal_bits_of_packed_sequences_beside_other_work() -> None:
    lengths = (700, 1, 0, 1300, 65)
    q, k, v = (x[0] for x in inputs(1, sum(lengths), sum(lengths), 8, 2))
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    arguments = (q, k, v, ends, ends, max(lengths), max(lengths))
    expected = attention_varlen(*arguments, causal=True)
    torch.cuda.synchronize()
    other = OtherWork()
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(RUNS):
        other.enqueue()
        differ += (attention_varlen(*arguments, causal=True) != expected).sum()
    assert differ.item() == 0


# ---------------------------------------------------------------------- gradients
REPEATS, LIMIT = "1000", 40  # seconds, of which the calls take about a third


@pytest.mark.parametrize(
    "family", [direction.family for direction in directions(BACKWARD)], ids=lambda f: f.name
)
def test_a_thousand_equal_gradients_beside_other_work(family: Family) -> None:
    """``deterministic=True``, a family's kernel for each case. It is a process of its own, which ends when
    kernels wait for each other for ever."""
    major, minor = torch.cuda.get_device_capability()
    if not family.runs_on(10 * major + minor):
        pytest.skip(f"the kernels of the {family.name} family do not run on this GPU")
    program = [sys.executable, str(Path(__file__).with_name("repeated_gradients.py")), family.name]
    built = subprocess.run([*program, "build"], capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([*program, REPEATS], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{REPEATS} equal") == len(CASES) * len(HEAD_SIZES)


# ---------------------------------------------------------------------- graphs
FIRST_CALL_IN_A_CAPTURE = """
import sys, torch
from flash_attention import attention, prepare
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.kernel_configs import DType

seq_q, seq_k, heads, heads_kv = map(int, sys.argv[1:5])
causal = sys.argv[5] == "causal"
right = 0 if causal else None
prepare([AttentionProblem(DType.BF16, 1, seq_q, seq_k, heads, heads_kv, 128, 128, right=right)])
q = torch.zeros(1, seq_q, heads, 128, device="cuda", dtype=torch.bfloat16)
k, v = (torch.zeros(1, seq_k, heads_kv, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = attention(q, k, v, causal=causal)
for value in (2.0, 5.0):
    v.fill_(value)
    graph.replay()
    assert (out == value).all(), (value, out)
q.normal_(), k.normal_(), v.normal_()
graph.replay()
assert torch.equal(out, attention(q, k, v, causal=causal))
print("captured")
"""


@pytest.mark.parametrize(
    "arguments", [(512, 512, 4, 4, "causal"), (1, 8192, 32, 8, ""), (100, 3000, 4, 2, "")], ids=str
)
def test_the_first_call_after_prepare_is_captured(arguments: tuple[object, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL_IN_A_CAPTURE, *map(str, arguments)],
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["captured"]


@pytest.mark.parametrize("name", SHAPES)
def test_calls_never_wait_for_the_gpu(name: str) -> None:
    *sizes, options = SHAPES[name]
    q, k, v = inputs(*sizes)
    attention(q, k, v, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        asleep = torch.cuda.Event()
        asleep.record()
        for _ in range(5):
            attention(q, k, v, **options)
        assert not asleep.query(), "the host waited until the GPU had woken"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


# ---------------------------------------------------------------------- memory
def test_nothing_grows_over_2000_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys 1 to 1000 twice, a new scale in each call, in each of the types that a scale may have."""
    q, k, v = inputs(1, 64, 1000, 4, 2)
    prepare([problem_of(q, k[:, :n], v[:, :n]) for n in range(1, 1001)])
    built = []
    monkeypatch.setattr(build, "build_kernels", lambda *a: built.append(a))
    scales = (float, np.float64, torch.tensor)
    after: dict[int, tuple[int, int]] = {}
    for call in range(2000):
        n = call % 1000 + 1
        out = attention(q, k[:, :n], v[:, :n], softmax_scale=scales[call % 3](0.05 + 1e-5 * call))
        if call in (50, 999, 1999):
            torch.cuda.synchronize()
            del out
            gc.collect()
            allocated = torch.cuda.memory_allocated()
            after[call] = (allocated, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    assert after[50][0] == after[999][0] == after[1999][0]
    assert after[1999][1] - after[50][1] < 20e6
    assert not built

    reference = weakref.ref(q)
    del q
    gc.collect()
    assert reference() is None


def test_the_explained_choice_is_the_one_that_runs() -> None:
    from flash_attention import last_kernel

    for *sizes, options in SHAPES.values():
        q, k, v = inputs(*sizes)
        attention(q, k, v, **options)
        assert explain_choice(q, k, v, **options).kernel == last_kernel()
