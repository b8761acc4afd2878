"""Keywords that a public function does not have: the error names the one that it has."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flash_attention import (
    attention,
    attention_varlen,
    explain_choice,
    forward,
    forward_timed,
    prepare,
    sdpa,
)
from flash_attention.cached import attention_cached
from flash_attention.checks.keywords import ADVICE, MEANINGS
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig

CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 64, 4, True, True, True, 0, 2, 2, True, True)
X = torch.zeros(1, 64, 2, 64, dtype=torch.float16)
ENDS = torch.tensor([0, 64], dtype=torch.int32)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "attention": (attention, (X, X, X)),
    "attention_varlen": (attention_varlen, (X[0], X[0], X[0], ENDS, ENDS, 64, 64)),
    "attention_cached": (attention_cached, (X, X, X, ENDS[1:])),
    "explain_choice": (explain_choice, (X, X, X)),
    "forward": (forward, (CONFIG, X, X, X)),
    "forward_timed": (forward_timed, (CONFIG, X, X, X)),
    "prepare": (prepare, ([],)),
    "sdpa": (sdpa, (X, X, X)),
}


@pytest.mark.parametrize("name", ["attention", "attention_varlen", "attention_cached", "explain_choice"])
@pytest.mark.parametrize(
    ("keyword", "advice"),
    [
        ("is_causal", "its name here is causal"),
        ("scale", "its name here is softmax_scale"),
        ("attn_mask", "flash_attention.mods.dense_mask"),
        ("dropout", "its name here is dropout_p"),
        ("window_size", "its name here is window"),
        ("return_softmax_lse", "its name here is return_lse"),
        ("return_attn_probs", "its name here is return_lse"),
        ("alibi_slopes", "functions by flash-attn's names take them"),
        ("enable_gqa", "heads are shared without asking"),
        ("s_aux", "its name here is sinks"),
        ("kernel_cfg", "its name here is config"),
        ("causel", "did you mean causal? It takes q, k, v, "),
        ("mask", "flash_attention.mods.dense_mask"),
        ("attention_mask", "flash_attention.mods.dense_mask"),
        ("attn_bias", "there is no such bias"),
        ("q_descale", "convert the tensors"),
        ("tensor_layout", "transpose what has another order"),
    ],
)
def test_keywords_of_other_libraries(name: str, keyword: str, advice: str) -> None:
    call, arguments = CALLS[name]
    with pytest.raises(TypeError, match=rf"^{name} has no argument {keyword}: .*{re.escape(advice)}"):
        call(*arguments, **{keyword: None})


@pytest.mark.parametrize("name", CALLS)
def test_every_public_function_names_what_it_takes(name: str) -> None:
    call, arguments = CALLS[name]
    with pytest.raises(
        TypeError,
        match=rf"^{name} has no argument nonsense: none of its own is known to mean that. It takes ",
    ) as raised:
        call(*arguments, nonsense=1)
    assert "unknown" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "keyword", "ours"),
    [
        ("forward", "config", "kernel_cfg"),
        ("forward", "out", "o"),
        ("forward_timed", "out", "o"),
        ("attention_cached", "cache_seqlens", "seqused_k"),
        ("attention_cached", "page_table", "block_table"),
        ("attention_varlen", "max_seqlen", "max_seqlen_q"),
        ("attention_varlen", "num_splits", "n_splits"),
        ("explain_choice", "num_splits", "n_splits"),
    ],
)
def test_the_name_here(name: str, keyword: str, ours: str) -> None:
    call, arguments = CALLS[name]
    with pytest.raises(TypeError, match=rf"^{name} has no argument {keyword}: its name here is {ours}\."):
        call(*arguments, **{keyword: None})


@pytest.mark.parametrize(
    ("keyword", "elsewhere"),
    [
        ("cu_seqlens_q", "attention_varlen"),
        ("cache_seqlens", "attention_cached"),
        ("block_table", "in pages"),
    ],
)
def test_what_another_function_takes(keyword: str, elsewhere: str) -> None:
    with pytest.raises(TypeError, match=rf"^attention has no argument {keyword}: .*{elsewhere}"):
        attention(X, X, X, **{keyword: ENDS})


def test_keywords_are_named_while_compiling() -> None:
    compiled = torch.compile(lambda x: attention(x, x, x, is_causal=True), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="its name here is causal"):
        compiled(X)


def test_a_name_has_one_meaning() -> None:
    names = [name for row in MEANINGS for name in row]
    assert len(names) == len(set(names))
    assert all(advice and not advice.endswith(".") for advice in ADVICE.values())


@pytest.mark.parametrize(
    ("keyword", "advice"),
    [
        ("window", "flash_attention.attention(…, window=…) takes a window"),
        ("sliding_window", "flash_attention.attention(…, window=…) takes a window"),
        ("softcap", "flash_attention.attention(…, softcap=…) takes a cap"),
        ("return_lse", "flash_attention.attention(…, return_lse=True) returns it"),
        ("mask", "its name here is attn_mask"),
    ],
)
def test_no_advice_loses_what_was_asked_for(keyword: str, advice: str) -> None:
    """``sdpa`` lacks what ``attention`` has: to leave it out would give another result."""
    with pytest.raises(TypeError, match=rf"^sdpa has no argument {keyword}: {re.escape(advice)}\. It takes"):
        sdpa(X, X, X, **{keyword: None})
