"""How long schedules take by the rule that ``explain_method`` states, and what is chosen by it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from flash_attention import distributed as cp
from flash_attention.call import Mask
from flash_attention.distributed import Layout, Rates, explain_method
from flash_attention.distributed.cost import Sizes, bytes_of, most_sent, predict
from flash_attention.distributed.schedule import METHODS, Heads, Schedule
from flash_helpers.benchmark.result_file import ResultFile
from flash_helpers.explain.measured_cells import RESULTS

CAUSAL = Mask(None, 0)
SENT = RESULTS / "h200x2-context-parallel.json"
ONE = Rates(flops=1.0, flops_backward=1.0, link=1e30, latency=0.0, call=0.0, memory=1e30)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_ranks_together_compute_the_work_of_one(method: str, world: int) -> None:
    """With zigzag each a W-th of it, to within the rows that no division gives out."""
    sizes, heads = Sizes(2, 64, 32), Heads(40, 40)
    whole = predict(Schedule(method, Layout.zigzag(640, 1), CAUSAL, heads), sizes, ONE)  # type: ignore[arg-type]
    assert whole.flop == 2 * 40 * (640 * 641 // 2) * 2 * (64 + 32)
    part = predict(Schedule(method, Layout.zigzag(640, world), CAUSAL, heads), sizes, ONE)  # type: ignore[arg-type]
    assert part.seconds == pytest.approx(part.flop)
    assert whole.flop / world <= part.flop <= whole.flop / world * 1.01


def test_the_bytes_are_those_of_the_tensors() -> None:
    """Of keys and values in 16 bit, and of their gradients in 32."""
    schedule = Schedule("ring", Layout.zigzag(640, 4), CAUSAL, Heads(8, 2))
    sizes = Sizes(3, 64, 32)
    # Every rank sends half of its 160 rows to those before it, and all or half to those behind.
    assert predict(schedule, sizes, ONE).held == 3 * 160 * 2 * (64 + 32) * 2
    message = next(m for step in schedule.backward(1) for m in step.sends if m.payload == "dkv")
    assert bytes_of(message, schedule, sizes) == 3 * message.count * 2 * (64 + 32) * 4


def test_the_bytes_of_a_call_are_those_that_two_gpus_sent() -> None:
    """In the committed file: the most of one rank, which is less than the most of each pass together."""
    rows = [row for row in ResultFile.load(SENT).facts["rows"] if "megabytes_sent" in row]
    assert len({(row["tokens"], row["window"], row["variant"], row["implementation"]) for row in rows}) > 36
    less = 0
    for row in rows:
        method = row["implementation"].split(",")[0].removeprefix("zigzag ")
        schedule = Schedule(
            method, Layout.zigzag(row["tokens"], 2), Mask.of(True, (row["window"], 0)), Heads(32, 8)
        )
        passes = (False, True)[: 1 + row["variant"].startswith("forward and backward")]
        sent = most_sent(schedule, Sizes(1, 128, 128), backward=True in passes)
        assert round(sent / 1e6, 3) == row["megabytes_sent"], row
        less += sent < sum(predict(schedule, Sizes(1, 128, 128), backward=which).sent for which in passes)
    assert less == 8  # all_gather and ring without a window, with gradients


def test_ulysses_sends_less_the_more_ranks_there_are_and_rings_do_not() -> None:
    sizes, heads = Sizes(1, 128, 128), Heads(32, 32)
    sent = {
        (method, world): predict(Schedule(method, Layout.zigzag(4096, world), Mask(), heads), sizes, ONE).sent  # type: ignore[arg-type]
        for method in METHODS
        for world in (2, 8, 32)
    }
    assert sent["ulysses", 32] < sent["ulysses", 8] < sent["ulysses", 2]
    assert sent["ring", 32] == sent["all_gather", 32] > sent["ring", 8]


def test_the_quickest_is_taken_and_the_reason_says_so() -> None:
    few_heads = explain_method(
        layout=Layout.zigzag(1 << 16, 16), n_heads=2, n_heads_kv=1, d_head=128, causal=True
    )
    assert few_heads.method != "ulysses"  # of 16 ranks 14 would have no head
    assert few_heads.reason.startswith(f"{few_heads.method}: predicted ")
    slow = Rates(link=1e9)
    many_heads = explain_method(
        layout=Layout.zigzag(1 << 16, 8), n_heads=64, n_heads_kv=64, d_head=64, causal=True, rates=slow
    )
    assert many_heads.method == "ulysses"
    window = explain_method(
        layout=Layout.contiguous(1 << 20, 16), n_heads=32, n_heads_kv=8, d_head=128, window=(4096, 0),
        rates=slow,
    )  # fmt: skip
    assert window.method != "ulysses"  # the others send the window alone
    for choice in (few_heads, many_heads, window):
        assert choice.seconds[choice.method] <= min(choice.seconds.values()) * 1.02
        assert choice.schedule.method == choice.method
        table = str(choice)
        assert all(f"\n{name}" in table for name in METHODS)
        assert "predicted from" in table


def test_what_is_explained_is_checked() -> None:
    with pytest.raises(TypeError, match=r"^layout is 8; it must be a Layout"):
        explain_method(layout=8, n_heads=1, n_heads_kv=1, d_head=64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^q has 3 heads and k and v have 2"):
        explain_method(layout=Layout.zigzag(8, 2), n_heads=3, n_heads_kv=2, d_head=64)


def test_a_thousand_ranks_are_predicted_in_seconds() -> None:
    for method in METHODS:
        schedule = Schedule(method, Layout.zigzag(1 << 20, 1024), CAUSAL, Heads(32, 8))
        for backward in (False, True):
            found = predict(schedule, Sizes(1, 128, 128), backward=backward)
            assert found.seconds >= found.compute > 0


def test_without_torch_distributed_the_way_to_start_it_is_said() -> None:
    assert not dist.is_initialized()
    x = torch.ones(1, 8, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"^torch.distributed is not started, .* torchrun$"):
        cp.attention(x, x, x, layout=Layout.zigzag(8, 1))
