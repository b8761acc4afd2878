"""Calls by the names of flash-attn 3 and vLLM in CUDA graphs: one graph serves all lengths and tables."""

from __future__ import annotations

import pytest
import torch
from serving_calls import CALLS, ServingCall

STEPS = 6


@pytest.mark.parametrize("title", CALLS)
def test_one_graph_serves_all_lengths_and_tables(title: str) -> None:
    call = ServingCall("cuda", **CALLS[title])
    call.draw(0)
    call.check(*call.call())  # builds the kernel, and begins what a stream has once
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call.call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call.call()
    for seed in range(1, STEPS + 1):
        call.draw(seed)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        call.check(out, lse)
