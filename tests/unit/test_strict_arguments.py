"""Values that were taken for others, outputs that lie on inputs, and tensors with their axes exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flash_attention import attention, attention_varlen, explain_choice
from flash_attention.cached import attention_cached
from flash_attention.run import launch_cache

ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)


def tensors(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(shape).half() for _ in range(3))  # type: ignore[return-value]


# ---------------------------------------------------------------------- numbers
@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
@pytest.mark.parametrize("value", [True, False, np.True_, torch.tensor(True)], ids=str)
@pytest.mark.parametrize("meta", [False, True])
def test_a_truth_value_is_no_number(name: str, value: Any, meta: bool) -> None:
    q, k, v = tensors(1, 8, 2, 32)
    given = [x.to("meta") for x in (q, k, v)] if meta else [q, k, v]
    with pytest.raises(TypeError, match=rf"^{name} is .*; it must be a real number"):
        attention(*given, **{name: value})
    with pytest.raises(TypeError, match=rf"^{name} is .*; it must be a real number"):
        explain_choice(q, k, v, **{name: value})
    packed = [x[0] for x in given]
    ends = torch.tensor([0, 8]).int().to(packed[0].device)
    with pytest.raises(TypeError, match=rf"^{name} is "):
        attention_varlen(*packed, ends, ends, 8, 8, **{name: value})
    with pytest.raises(TypeError, match=rf"^{name} is "):
        attention_cached(*given, ends[1:], **{name: value})


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_a_truth_value_is_not_taken_for_a_number_that_was_remembered(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """True equals 1.0, so that a table of calls would find it."""
    q, k, v = tensors(1, 8, 2, 32)
    asked = []
    monkeypatch.setattr(launch_cache, "repeat", lambda key, *given: asked.append(key))
    attention(q, k, v, **{name: 1.0})
    assert len(asked) == 1
    with pytest.raises(TypeError, match=rf"^{name} is True"):
        attention(q, k, v, **{name: True})
    assert len(asked) == 1


def test_a_negative_count_of_keys_is_refused() -> None:
    q, k, v = tensors(2, 8, 2, 32)
    with pytest.raises(ValueError, match=r"^seqused_k has -3; a count of keys is at least 0"):
        attention_cached(q, k, v, torch.tensor([4, -3]).int())
    table = torch.arange(2).int()[:, None]
    with pytest.raises(ValueError, match=r"^seqused_k has -1"):
        attention_cached(q, k, v, torch.tensor([-1, 4]).int(), block_table=table)


# ---------------------------------------------------------------------- outputs
def overlapping(whole: Tensor, dtype: torch.dtype, n: int) -> Tensor:
    """n numbers in the memory of a tensor."""
    return whole.view(-1).view(dtype)[:n]


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "cu_seqlens_q": lambda out: attention_varlen(
        *tensors(8, 2, 32), overlapping(out, torch.int32, 3).copy_(ENDS), ENDS, 5, 5, out=out
    ),
    "cu_seqlens_k": lambda out: attention_varlen(
        *tensors(8, 2, 32), ENDS, overlapping(out, torch.int32, 3).copy_(ENDS), 5, 5, out=out
    ),
    "seqused_k": lambda out: attention_cached(
        *tensors(2, 4, 2, 32), overlapping(out, torch.int32, 2).fill_(3), out=out
    ),
    "block_table": lambda out: attention_cached(
        *tensors(2, 4, 2, 32), torch.tensor([3, 4]).int(),
        block_table=overlapping(out, torch.int32, 2).fill_(0).view(2, 1), out=out,
    ),
    "sinks": lambda out: attention(*tensors(2, 4, 2, 32), sinks=overlapping(out, torch.float16, 2), out=out),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_an_output_may_overlap_no_input(name: str) -> None:
    shape = (8, 2, 32) if name.startswith("cu_") else (2, 4, 2, 32)
    with pytest.raises(ValueError, match=f"^out overlaps {name} in memory"):
        CALLS[name](torch.zeros(shape).half())


# ---------------------------------------------------------------------- axes
def heads_first(seq_len: int, heads: int) -> Tensor:
    return torch.randn(2, heads, seq_len, 32).half()


def test_heads_before_the_lengths_are_seen_where_they_do_not_fit() -> None:
    q, k = heads_first(20, 4), heads_first(30, 2)
    with pytest.raises(
        ValueError, match=r"look like \(batch, heads, seq, d\): pass q.transpose\(1, 2\).*sdpa"
    ):
        attention(q, k, k)
    attention(*(x.transpose(1, 2) for x in (q, k, k)))  # which is what the error says
    with pytest.raises(ValueError, match=r"look like \(batch, heads, seq, d\)"):
        attention(q.to("meta"), k.to("meta"), k.to("meta"))
    ends = (torch.tensor([0, 4]).int(), torch.tensor([0, 2]).int())
    with pytest.raises(ValueError, match=r"look like \(heads, total, d\): pass q.transpose\(0, 1\)"):
        attention_varlen(q[0], k[0], k[0], *ends, 4, 2)


def test_other_head_counts_give_no_such_hint() -> None:
    q, k = heads_first(20, 5).transpose(1, 2), heads_first(30, 2).transpose(1, 2)
    with pytest.raises(ValueError, match="must be a multiple") as raised:
        attention(q, k, k)
    assert "look like" not in str(raised.value)
