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
from flash_attention.compat.transformers.band import CAUSAL, EVERYTHING  # noqa: E402
from flash_attention.compat.transformers.mods import meaning_of_tensor  # noqa: E402

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


def test_models_that_support_no_other_attention_refuse_the_name() -> None:
    class OnlyItsOwn(transformers.LlamaForCausalLM):
        _supports_flash_attn = False
        _supports_sdpa = False

    kernels.register()
    config = small(transformers.LlamaConfig)
    config._attn_implementation = kernels.NAME
    with pytest.raises(ValueError, match=r"^OnlyItsOwn supports no other attention than its own"):
        OnlyItsOwn(config)
    config._attn_implementation = "eager"
    with pytest.raises(ValueError, match=r"^OnlyItsOwn supports no other attention than its own"):
        OnlyItsOwn(config).set_attn_implementation(kernels.NAME)


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("is_training", [False, True])
def test_biases_of_positions_and_their_gradients(is_training: bool) -> None:
    """T5 has one for its encoder, one for its decoder, and one of zeros between them."""
    sizes = dict(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    config = dict(sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, initializer_factor=0.05)
    ours, theirs = pair(transformers.T5ForConditionalGeneration, transformers.T5Config(**config))
    if not ours._can_set_attn_implementation():
        pytest.skip("up to 5.0 T5 takes its attention from classes of its own")
    tokens, mask = tokens_of(), torch.ones(2, 20, dtype=torch.int64)
    mask[1, 14:] = 0
    for model in (ours, theirs):
        model.train(is_training)
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                torch.manual_seed(1)
                torch.nn.init.normal_(parameter, std=2.0)
    given = dict(input_ids=tokens, attention_mask=mask, labels=tokens_of(9))
    results = [model(**given) for model in (ours, theirs)]
    alike(results[0].logits, results[1].logits)
    if is_training:
        for result in results:
            result.loss.backward()
        for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if "relative_attention_bias" in name:
                scale = y.grad.float().abs().max()
                assert scale > 0
                alike(x.grad / scale, y.grad / scale)


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


def masks_of_four_dimensions() -> dict[str, Tensor]:
    """(batch, 1, 20, 20), by what they say."""
    causal, lowest = torch.ones(20, 20).tril() > 0, torch.finfo(torch.bfloat16).min
    prefix = (causal | (torch.arange(20) < 6)).expand(2, 1, 20, 20)
    items = prefix.clone()
    items[1, :, :, 13:] = False
    return {
        "nothing": torch.zeros(2, 1, 20, 20, dtype=torch.bfloat16),
        "causal": torch.zeros(20, 20, dtype=torch.bfloat16).masked_fill(~causal, lowest).expand(2, 1, 20, 20),
        "a prefix": torch.zeros(2, 1, 20, 20, dtype=torch.bfloat16).masked_fill(~prefix, lowest),
        "other items": torch.zeros(2, 1, 20, 20, dtype=torch.bfloat16).masked_fill(~items, -torch.inf),
        "numbers": torch.randn(2, 1, 20, 20, generator=torch.Generator().manual_seed(1)).bfloat16(),
    }


@pytest.mark.only_on("cpu")
@torch.no_grad()
@pytest.mark.parametrize("what", masks_of_four_dimensions())
def test_masks_of_four_dimensions(what: str) -> None:
    ours, theirs = llamas()
    mask = masks_of_four_dimensions()[what]
    alike(ours(tokens_of(), attention_mask=mask).logits, theirs(tokens_of(), attention_mask=mask).logits)
    x = torch.randn(2, 4, 20, 16).bfloat16()
    for seen in (mask, mask == 0):
        meaning = meaning_of_tensor(seen, x.transpose(1, 2), x.transpose(1, 2))
        band = {"nothing": EVERYTHING, "causal": CAUSAL}.get(what)
        if band is not None:
            assert (meaning.band, meaning.has_mods) == (band, False)
        else:
            assert meaning.has_mods
        assert meaning_of_tensor(seen, x.transpose(1, 2), x.transpose(1, 2)) is meaning  # looked at once


@pytest.mark.only_on("cpu")
def test_a_mask_that_is_changed_is_looked_at_again() -> None:
    x, mask = torch.zeros(2, 20, 4, 16).bfloat16(), torch.ones(1, 1, 20, 20, dtype=torch.bool)
    assert not meaning_of_tensor(mask, x, x).has_mods
    mask[0, 0, 3, 5] = False
    assert meaning_of_tensor(mask, x, x).has_mods


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
