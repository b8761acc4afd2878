"""A small Llama-shaped model, grouped heads and a causal mask, in prefill and token by token."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from attention_interface import NAME
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flash_attention import last_kernel

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
VOCABULARY, BATCH, TOKENS, PROMPT = 512, 2, 140, 120


def model(implementation: str, dtype: torch.dtype, device: str) -> LlamaForCausalLM:
    """Random weights, the same in every call: 3 layers, 8 query and 2 kv heads of 64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        attn_implementation=implementation,
        initializer_range=0.08,  # attention that looks at some tokens more than at others
    )
    return LlamaForCausalLM(config).eval().to(dtype).to(device)


def tokens() -> Tensor:
    """(BATCH, TOKENS) on the CPU."""
    return torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))


def prefill(net: LlamaForCausalLM, device: str) -> Tensor:
    """Logits (BATCH, TOKENS, VOCABULARY) of all tokens at once, float32 on the CPU."""
    with torch.inference_mode():
        return net(tokens().to(device)).logits.float().cpu()


def token_by_token(net: LlamaForCausalLM, device: str) -> Tensor:
    """The same, after a prompt one token at a time over a cache."""
    ids, found, cache = tokens().to(device), [], None
    with torch.inference_mode():
        for begin, end in ((0, PROMPT), *((i, i + 1) for i in range(PROMPT, TOKENS))):
            step = net(ids[:, begin:end], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            found.append(step.logits)
    return torch.cat(found, 1).float().cpu()


@cache
def expected() -> Tensor:
    """The model's own attention in float32. Its weights are those of the 16-bit models before rounding."""
    return prefill(model("eager", torch.float32, "cpu"), "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_logits(device: str, dtype: torch.dtype) -> None:
    theirs = (prefill(model("eager", dtype, device), device) - expected()).abs().max()
    assert theirs > 0
    net = model(NAME, dtype, device)
    ours = prefill(net, device)
    kernel = last_kernel()
    assert kernel is not None
    assert kernel.traits.causal
    assert (ours - expected()).abs().max() <= 2 * theirs
    steps = token_by_token(net, device)
    kernel = last_kernel()
    assert kernel is not None
    assert not kernel.traits.causal  # a single query sees every key
    assert (steps - expected()).abs().max() <= 2 * theirs
    # The two ways round in different places and agree as closely as either does with the original.
    assert (steps - ours).abs().max() <= 2 * theirs


def test_a_wrong_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import attention_interface

    real = attention_interface.attention
    monkeypatch.setattr(
        attention_interface,
        "attention",
        lambda q, k, v, **options: real(q, k, v, **{**options, "causal": False}),
    )
    theirs = (prefill(model("eager", torch.bfloat16, "cpu"), "cpu") - expected()).abs().max()
    ours = prefill(model(NAME, torch.bfloat16, "cpu"), "cpu")
    assert (ours - expected()).abs().max() > 4 * theirs
