"""``attention`` on the stream, in the graph and on the GPU that are the caller's; also with keys in parts."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_cases import check_the_callers_stream

from flash_attention import attention, explain_choice

SHAPES = {"queries": ((1, 512, 4, 64), (1, 512, 4, 64)), "parts": ((1, 1, 4, 64), (1, 8192, 4, 64))}
each_shape = pytest.mark.parametrize("name", SHAPES)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def zeros(name: str, device: str = "cuda") -> list[torch.Tensor]:
    """q, k, v."""
    q_shape, kv_shape = SHAPES[name]
    return [torch.zeros(s, dtype=torch.float16, device=device) for s in (q_shape, kv_shape, kv_shape)]


def test_keys_are_cut_into_parts_where_that_is_tested() -> None:
    assert explain_choice(*zeros("parts")).n_splits > 1


@each_shape
def test_the_callers_stream(name: str) -> None:
    q, k, v = zeros(name)
    out = torch.empty_like(q)
    check_the_callers_stream(lambda: attention(q, k, v, out=out), v, out)


@each_shape
def test_a_captured_call(name: str) -> None:
    q, k, v = zeros(name)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
    address = out.data_ptr()
    for value in (2.0, 5.0):
        v.fill_(value)
        out.fill_(math.nan)
        graph.replay()
        assert (out == value).all()
    for x in (q, k, v):
        x.normal_()
    graph.replay()
    assert torch.equal(out, attention(q, k, v))
    assert out.data_ptr() == address


# ---------------------------------------------------------------------- several GPUs
@two_gpus
@each_shape
@pytest.mark.parametrize(("current", "other"), [(0, 1), (1, 0)])
def test_a_gpu_that_is_not_the_current_one(name: str, current: int, other: int) -> None:
    with torch.cuda.device(current):
        q, k, v = zeros(name, f"cuda:{other}")
        v.fill_(3)
        before = torch.cuda.memory_allocated(current)
        for _ in range(3):
            out, lse = attention(q, k, v, return_lse=True)
            assert (out == 3).all()
            assert out.device == lse.device == q.device
            torch.testing.assert_close(lse, torch.full_like(lse, math.log(k.shape[1])))
        assert torch.cuda.current_device() == current
        assert torch.cuda.memory_allocated(current) == before


@two_gpus
def test_tensors_on_several_gpus_are_refused() -> None:
    q, k, v = zeros("queries", "cuda:0")
    with pytest.raises(ValueError, match=r"q on cuda:0, k on cuda:1, v on cuda:0"):
        attention(q, k.to("cuda:1"), v)
    with pytest.raises(ValueError, match=r"q on cuda:0, k on cpu, v on cuda:0"):
        attention(q, k.cpu(), v)
    assert (attention(q, k, v) == 0).all()
