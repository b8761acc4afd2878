"""Whole models: what they refuse to be made with, caches, assistants, packed batches, torch.compile."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
kernels = pytest.importorskip("flash_attention.integrations.transformers")

# Up to 5.0 a model counts the places of its tokens from the filling of its cache, which it reads.
READS_PLACES = "cache_position" in inspect.signature(transformers.MistralForCausalLM.forward).parameters


def small(config_class: type, **options: Any) -> Any:
    sizes = dict(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    return config_class(**{**sizes, **options})


def pair(model_class: type, config: Any) -> tuple[Any, Any]:
    """The same model by this library and by eager attention, in bfloat16."""
    kernels.register(model_class)
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    theirs = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" not in name:
                parameter.mul_(4)
    theirs = theirs.bfloat16()
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(kernels.NAME)
    return ours, theirs


def llamas(**options: Any) -> tuple[Any, Any]:
    return pair(transformers.LlamaForCausalLM, small(transformers.LlamaConfig, **options))


def tokens_of(n: int = 20) -> Tensor:
    return torch.arange(2, 2 + 2 * n).view(2, n) * 7 % 126 + 2


def alike(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.float(), theirs.float(), atol=0.05, rtol=0.05)


def test_models_that_support_no_flash_attention_refuse_the_name() -> None:
    kernels.register()
    config = transformers.T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4)
    config._attn_implementation = kernels.NAME
    with pytest.raises(ValueError, match=r"T5Model supports no flash attention"):
        transformers.T5Model(config)
    config._attn_implementation = "eager"
    model = transformers.T5Model(config)
    if model._can_set_attn_implementation():
        with pytest.raises(ValueError, match=r"T5Model supports no flash attention"):
            model.set_attn_implementation(kernels.NAME)
    else:  # up to 5.0: Transformers warns that the model knows no interface, and changes nothing
        model.set_attn_implementation(kernels.NAME)
        assert model.config._attn_implementation == "eager"


def test_models_with_a_list_refuse_the_name_until_it_is_on_it() -> None:
    class OneOfAList(transformers.LlamaForCausalLM):
        _compatible_flash_implementations = ["flash_attention_3"]  # noqa: RUF012

    kernels.register()
    config = small(transformers.LlamaConfig)
    config._attn_implementation = kernels.NAME
    with pytest.raises(
        ValueError, match=r"^OneOfAList lists the flash attentions that it accepts, flash_att"
    ):
        OneOfAList(config)
    kernels.register(OneOfAList)
    assert OneOfAList(config).config._attn_implementation == kernels.NAME


@torch.no_grad()
def test_a_mask_of_four_dimensions_is_refused() -> None:
    ours, _ = llamas()
    with pytest.raises(NotImplementedError, match=r"^attention_mask has shape \(2, 1, 20, 20\)"):
        ours(tokens_of(), attention_mask=torch.zeros(2, 1, 20, 20, dtype=torch.bfloat16))


@torch.no_grad()
def test_output_attentions_is_refused() -> None:
    ours, _ = llamas()
    with pytest.raises((NotImplementedError, ValueError), match="output_attentions"):
        ours(tokens_of(), output_attentions=True)


@torch.no_grad()
@pytest.mark.skipif(transformers.__version__ < "5", reason="4.57 knows no such configuration")
def test_a_decoder_without_causality_sees_the_future() -> None:
    """``is_causal=False`` in the configuration makes its masks bidirectional."""
    ours, theirs = llamas(is_causal=False)
    tokens = tokens_of()
    alike(ours(tokens).logits, theirs(tokens).logits)
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    rows = mask.bool()
    alike(ours(tokens, attention_mask=mask).logits[rows], theirs(tokens, attention_mask=mask).logits[rows])


@torch.no_grad()
def test_packed_sequences_of_a_batch() -> None:
    ours, theirs = llamas()
    positions = torch.tensor([[*range(8), *range(12)], [*range(5), *range(15)]])
    given = dict(position_ids=positions, use_cache=False)
    alike(ours(tokens_of(), **given).logits, theirs(tokens_of(), **given).logits)
    with pytest.raises(NotImplementedError, match="do not agree on where packed sequences start"):
        ours(tokens_of(), position_ids=positions, use_cache=True)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("sliding_window", [None, 8])
def test_generation_with_caches(cache: str, sliding_window: int | None) -> None:
    model_class, config_class = transformers.MistralForCausalLM, transformers.MistralConfig
    ours, theirs = pair(model_class, small(config_class, sliding_window=sliding_window))
    tokens = tokens_of()
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    for given in ({}, {"attention_mask": mask}):
        steps = []
        for model in (ours, theirs):
            out = model.generate(
                tokens, max_new_tokens=5, do_sample=False, cache_implementation=cache,
                return_dict_in_generate=True, output_logits=True, disable_compile=True, **given,
            )  # fmt: skip
            steps.append(out.logits[0])
        alike(*steps)


@torch.no_grad()
def test_generation_with_an_assistant() -> None:
    ours, _ = llamas()
    assistant, _ = llamas()
    tokens = tokens_of()[:1]
    plain = ours.generate(tokens, max_new_tokens=8, do_sample=False)
    assisted = ours.generate(tokens, max_new_tokens=8, do_sample=False, assistant_model=assistant)
    assert torch.equal(plain[:, :21], assisted[:, :21])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["plain", "padded", "without a cache", "padded without a cache"])
def test_a_compiled_model(kind: str) -> None:
    ours, theirs = llamas()
    tokens = tokens_of()
    mask = torch.ones_like(tokens)
    given: dict[str, Any] = {"use_cache": "without" not in kind}
    if "padded" in kind:
        mask[1, :7] = 0
        given["attention_mask"] = mask
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    alike(compiled(tokens, **given).logits[mask.bool()], theirs(tokens, **given).logits[mask.bool()])


@torch.no_grad()
@pytest.mark.only_on("cpu")  # on a GPU it is an assertion of the device, which ends its use
@pytest.mark.skipif(transformers.__version__ < "5", reason="4.57 reads positions, which breaks the graph")
def test_packed_sequences_of_a_compiled_model_need_offsets() -> None:
    ours, theirs = llamas()
    tokens = tokens_of()[:1]
    positions = torch.tensor([[*range(8), *range(12)]])
    expected = theirs(tokens, position_ids=positions, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="pass cu_seq_lens_q, cu_seq_lens_k"):
        compiled(tokens, position_ids=positions, use_cache=False)
    offsets = torch.tensor([0, 8, 20], dtype=torch.int32)
    packed = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=12, max_length_k=12)
    alike(compiled(tokens, position_ids=positions, use_cache=False, **packed).logits, expected)
    alike(ours(tokens, position_ids=positions, use_cache=False, **packed).logits, expected)


@torch.no_grad()
@pytest.mark.skipif(transformers.__version__ < "5", reason="4.57 takes other arguments for its caches")
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("sliding_window", [None, 8])
def test_a_compiled_model_with_a_static_cache(sliding_window: int | None, is_padded: bool) -> None:
    """Prefill and two steps, whose places are numbers of the device."""
    model_class, config_class = transformers.MistralForCausalLM, transformers.MistralConfig
    ours, theirs = pair(model_class, small(config_class, sliding_window=sliding_window))
    tokens = tokens_of()
    mask = torch.ones_like(tokens)
    if is_padded:
        mask[1, :7] = 0
    torch._dynamo.reset()
    if (
        READS_PLACES and sliding_window is None
    ):  # Transformers' own attention fails at the second call as well
        for model in (theirs, ours):
            cache = transformers.StaticCache(config=theirs.config, max_cache_len=32)
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            compiled(tokens[:, :18], past_key_values=cache, use_cache=True)
            with pytest.raises(torch._dynamo.exc.TorchDynamoException):
                compiled(tokens[:, 18:19], past_key_values=cache, use_cache=True)
        return
    logits = []
    for call in (torch.compile(ours, fullgraph=True, backend="aot_eager"), theirs):
        cache = transformers.StaticCache(config=theirs.config, max_cache_len=32)
        steps = []
        for begin, end in ((0, 18), (18, 19), (19, 20)):
            given = {"attention_mask": mask[:, :end]} if is_padded else {}
            result = call(tokens[:, begin:end], past_key_values=cache, use_cache=True, **given)
            steps.append(result.logits)
        logits.append(torch.cat(steps, 1)[mask.bool()])
    alike(*logits)
