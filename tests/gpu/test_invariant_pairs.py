"""Line C74 of docs/contract.md on a GPU: random pairs of calls of each family, graphs, limits of SMs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_attention import attention, attention_varlen
from flash_attention.backends.cuda import device_facts_of
from flash_helpers.kernels.families import FAMILIES

PAIRS, TIME_LIMIT_S = 10_000, 900
PROCESSES = 5  # that share the pairs
NAMES = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("family", NAMES)
def test_random_pairs_have_equal_bits(family: str) -> None:
    if not NAMES[family].runs_on(device_facts_of().target):
        pytest.skip(f"kernels of the {family} family do not run here")
    script = Path(__file__).with_name("invariant_pairs.py")
    done = subprocess.run(
        [sys.executable, str(script), family, str(PAIRS), str(TIME_LIMIT_S), str(PROCESSES)],
        capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert told["first"] == []
    assert told["pairs"] == PAIRS
    assert told["differing"] == 0


def _rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def test_a_graph_replays_the_same_bits_at_other_lengths() -> None:
    """Lengths that change between replays give what eager calls give."""
    torch.manual_seed(0)
    q, k, v = _rows(3, 8, 128), _rows(3, 6000, 2, 128), _rows(3, 6000, 2, 128)
    ends = torch.arange(4, dtype=torch.int32, device="cuda")
    used = torch.tensor([10, 20, 30], dtype=torch.int32, device="cuda")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return attention_varlen(
            q, k, v, ends, None, 1, 6000, seqused_k=used, causal=True, return_lse=True, numerics="invariant"
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for lengths in ([5999, 1, 1024], [1025, 3000, 6000], [4096, 4095, 4097]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        for b, n in enumerate(lengths):
            one, one_lse = attention(
                q[None, b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], return_lse=True, numerics="invariant"
            )
            assert torch.equal(out[b], one[0, 0])
            assert torch.equal(lse[:, b], one_lse[0, :, 0])


def test_a_limit_of_sms_changes_no_bit() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only kernels of the Hopper family keep to a limit")
    torch.manual_seed(1)
    q, k, v = (_rows(2, 3000, 4, 128) for _ in range(3))
    whole = attention(q, k, v, causal=True, return_lse=True, numerics="invariant")
    for n_sms in (1, 7, 100):
        part = attention(q, k, v, causal=True, return_lse=True, numerics="invariant", n_sms=n_sms)
        assert all(torch.equal(a, b) for a, b in zip(whole, part, strict=True))


def test_a_wrong_max_seqlen_k_changes_no_bit() -> None:
    """Keys are cut by what it says, and those of a sequence that is longer are not cut (C25)."""
    torch.manual_seed(3)
    q, k, v = _rows(4, 4, 128), _rows(9100, 2, 128), _rows(9100, 2, 128)
    q_ends, k_ends = (
        torch.tensor(ends, dtype=torch.int32, device="cuda") for ends in ([0, 1, 3, 4], [0, 3000, 3100, 9100])
    )
    calls = [
        attention_varlen(q, k, v, q_ends, k_ends, 2, most, return_lse=True, numerics="invariant")
        for most in (6000, 1, 1024, 2048, 5000, 9100)
    ]
    for call in calls[1:]:
        assert all(torch.equal(a, b) for a, b in zip(calls[0], call, strict=True))


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_result_is_as_exact_as_without(scale: float) -> None:
    torch.manual_seed(2)
    q, k, v = (_rows(1, 5000, 2, 128) for _ in range(3))
    q = q * scale
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    errors = [
        (attention(q, k, v, causal=True, numerics=numerics).double() - exact).square().mean().sqrt()
        for numerics in (None, "invariant")
    ]
    assert errors[1] <= 1.05 * errors[0]
