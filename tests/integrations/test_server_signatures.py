"""Parameters of the functions that others name: their order and defaults, so that a call by position means
the same there and here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from flash_attention.integrations import flash_attn_3, flashinfer, vllm

SCALES = "q_descale=None k_descale=None v_descale=None"
OF_A_PLAN = (
    "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
    "qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None "
    "page_size=None max_seqlen_k_new=0 causal=False window_size=(-1,-1)"
)
END_OF_A_PLAN = "has_softcap=False num_splits=0 pack_gqa=None sm_margin=0"
END_OF_3 = (
    f"softmax_scale=None causal=False qv=None {SCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
    "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
)
SIGNATURES: dict[Any, str] = {
    flash_attn_3.flash_attn_func: f"q k v {END_OF_3}",
    flash_attn_3.flash_attn_qkvpacked_func: f"qkv softmax_scale=None causal=False {SCALES} "
    "window_size=(-1,-1) attention_chunk=0 softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 "
    "return_attn_probs=False",
    flash_attn_3.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    f"seqused_q=None seqused_k=None {END_OF_3}",
    flash_attn_3.flash_attn_with_kvcache: "q k_cache v_cache k=None v=None qv=None rotary_cos=None "
    "rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None "
    "cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
    f"{SCALES} softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
    "rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None sm_margin=0 "
    "return_softmax_lse=False",
    flash_attn_3.flash_attn_combine: "out_partial lse_partial out=None out_dtype=None",
    flash_attn_3.get_scheduler_metadata: f"{OF_A_PLAN} attention_chunk=0 {END_OF_A_PLAN}",
    vllm.flash_attn_varlen_func: "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k=None "
    "seqused_k=None q_v=None dropout_p=0.0 softmax_scale=None causal=False window_size=None softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False block_table=None "
    f"return_softmax_lse=False out=None scheduler_metadata=None {SCALES} num_splits=0 fa_version=2 "
    "s_aux=None cp_world_size=1 cp_rank=0 cp_tot_seqused_k=None",
    vllm.get_scheduler_metadata: f"{OF_A_PLAN} {END_OF_A_PLAN}",
    flashinfer.merge_state: "v_a s_a v_b s_b",
    flashinfer.merge_state_in_place: "v s v_other s_other mask=None",
    flashinfer.merge_states: "v s",
}


def parameters(function: Any) -> list[str]:
    """Those that may be given by position, with their defaults."""
    found = inspect.signature(function).parameters.values()
    return [
        x.name if x.default is x.empty else f"{x.name}={x.default!r}".replace(" ", "")
        for x in found
        if x.kind is x.POSITIONAL_OR_KEYWORD
    ]


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda x: f"{x.__module__.split('.')[-1]}.{x.__name__}")
def test_arguments_by_position_are_those_of_the_other_library(function: Any) -> None:
    assert parameters(function) == SIGNATURES[function].split()


@pytest.mark.parametrize("module", [flash_attn_3, vllm, flashinfer], ids=lambda x: x.__name__.split(".")[-1])
def test_every_function_of_a_server_is_in_the_table(module: Any) -> None:
    assert {getattr(module, name) for name in module.__all__} <= set(SIGNATURES)


def test_a_plan_of_vllms_refuses_by_position_what_no_call_takes() -> None:
    counts = torch.ones(2, dtype=torch.int32)
    behind = (torch.bfloat16, None, None, None, None, 16, 0, True, (-1, -1), False, 0, None)
    assert vllm.get_scheduler_metadata(2, 1, 48, 4, 2, 32, counts, *behind, 0) is None
    with pytest.raises(NotImplementedError, match=r"^sm_margin is 4"):
        vllm.get_scheduler_metadata(2, 1, 48, 4, 2, 32, counts, *behind, 4)
    with pytest.raises(TypeError, match=r"^get_scheduler_metadata has no argument attention_chunk: "):
        vllm.get_scheduler_metadata(2, 1, 48, 4, 2, 32, counts, attention_chunk=4)


def test_vllm_returns_the_log_sum_exp_by_one_name_alone() -> None:
    q, ends = torch.randn(3, 4, 32).bfloat16(), torch.tensor([0, 1, 3], dtype=torch.int32)
    out = vllm.flash_attn_varlen_func(q, q, q, 2, ends, 2, ends, return_attn_probs=True)
    both = vllm.flash_attn_varlen_func(q, q, q, 2, ends, 2, ends, return_softmax_lse=True)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, both[0])
    assert both[1].shape == (4, 3)
