"""Randomly initialised models: logits in prefill and generation are those of Transformers' own attention."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")
kernels = pytest.importorskip("flash_attention.compat.transformers")
from transformers import masking_utils  # noqa: E402

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
    eos_token_id=None,
)  # fmt: skip
WINDOW = 8
MODELS = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 16},
    "Gemma3": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "GptOss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def refuses_the_name(config: object) -> bool:
    try:
        config._attn_implementation = kernels.NAME
    except ValueError as error:
        return "does not support the specified flash attention implementation" in str(error)
    return False


GPT_OSS_REFUSES = refuses_the_name(transformers.GptOssConfig(**SIZES))  # in 5.0, all names but one
if GPT_OSS_REFUSES:
    del MODELS["GptOss"]
CONFIG_NAMES = {"Gemma3": "Gemma3TextConfig"}


@pytest.fixture(params=MODELS)
def models(request: pytest.FixtureRequest):
    """The same model by this library and by Transformers, in bfloat16, and the latter in float32."""
    name = request.param
    model_class = getattr(transformers, f"{name}ForCausalLM")
    kernels.register(model_class)
    config = getattr(transformers, CONFIG_NAMES.get(name, f"{name}Config"))(**SIZES, **MODELS[name])
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    exact = model_class(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in exact.named_parameters():
            if "norm" not in parameter_name:
                parameter.mul_(4)  # scores that are far from uniform
            if "sinks" in parameter_name:
                parameter.normal_(0, 2)
    theirs = copy.deepcopy(exact).bfloat16()
    ours_config = copy.deepcopy(config)
    ours_config._attn_implementation = kernels.NAME
    ours = model_class(ours_config).eval().bfloat16()
    ours.load_state_dict(theirs.state_dict())
    assert ours.config._attn_implementation == kernels.NAME
    exact.load_state_dict({key: value.float() for key, value in theirs.state_dict().items()})
    return ours, theirs, exact


def test_gpt_oss_is_refused_by_its_configuration_in_old_versions_alone() -> None:
    assert ("GptOss" in MODELS) != GPT_OSS_REFUSES
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    assert not GPT_OSS_REFUSES or version < (5, 17)


def batch(padding: str | None) -> tuple[Tensor, Tensor]:
    """Tokens and mask of two sequences, the second one shorter where there is padding."""
    tokens = torch.arange(2, 2 + 2 * 20).view(2, 20) * 7 % 126 + 2
    mask = torch.ones_like(tokens)
    if padding:
        rows = slice(0, 7) if padding == "left" else slice(13, 20)
        mask[1, rows], tokens[1, rows] = 0, 0
    return tokens, mask


def no_worse(ours: Tensor, theirs: Tensor, exact: Tensor) -> None:
    """The error is at most twice that of Transformers' eager attention in the same type."""
    limit = 2 * (theirs.float() - exact).abs().max() + 1e-3
    assert exact.std() > 0.1
    assert (ours.float() - exact).abs().max() <= limit


@torch.no_grad()
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_logits(models, padding: str | None) -> None:
    tokens, mask = batch(padding)
    got = [model(tokens, attention_mask=mask).logits[mask.bool()] for model in models]
    no_worse(*got)


@torch.no_grad()
def test_generation(models) -> None:
    """Prefill of a padded batch and steps from the cache, past the window: the logits of each step."""
    tokens, mask = batch("left")
    exact = models[2]
    chosen = exact.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
    steps = []
    for model in models:
        cache, logits = None, []
        for end in range(20, 26):
            begin = 0 if cache is None else end - 1
            longer = torch.cat((mask, torch.ones(2, end - 20, dtype=mask.dtype)), dim=1)
            positions = (longer.cumsum(1) - 1).clamp(min=0)[:, begin:]
            result = model(
                chosen[:, begin:end], attention_mask=longer, position_ids=positions, past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
            cache = result.past_key_values
            logits.append(result.logits[:, -1])
        steps.append(torch.stack(logits))
    no_worse(*steps)


@torch.no_grad()
def test_generate_runs_the_library(models, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = kernels.forward
    original = forward.attention
    monkeypatch.setattr(
        forward, "attention", lambda *args, **options: calls.append(1) or original(*args, **options)
    )
    tokens, _ = batch(None)
    out = models[0].generate(tokens, max_new_tokens=3, do_sample=False)
    assert out.shape == (2, 23)
    assert len(calls) == 3 * SIZES["num_hidden_layers"]


# ---------------------------------------------------------------------- one layer
class Layer(torch.nn.Module):
    is_causal = True


def heads(seq_len: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seq_len)
    return tuple(torch.randn(1, 2, seq_len, 16, generator=generator).half() for _ in range(3))


def same(got: Tensor, expected: Tensor) -> None:
    """Equal bits on the CPU; on a GPU, where packed sequences take another kernel, equal but for rounding."""
    exact = dict(atol=0, rtol=0) if got.device.type == "cpu" else dict(atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(got, expected, **exact)


@pytest.mark.parametrize("by", ["positions", "offsets"])
def test_packed_sequences_do_not_see_each_other(by: str) -> None:
    q, k, v = heads(9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    offsets = torch.tensor([0, 4, 9])
    given = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=5, max_length_k=5)
    options = {"position_ids": positions} if by == "positions" else given
    out, _ = kernels.attention_forward(Layer(), q, k, v, None, **options)
    for part in (slice(0, 4), slice(4, 9)):
        alone, _ = kernels.attention_forward(Layer(), q[:, :, part], k[:, :, part], v[:, :, part], None)
        same(out[:, part], alone)


def test_a_static_cache_has_more_rows_than_tokens() -> None:
    q, k, v = heads(9)
    mask = kernels.padding_mask(1, 1, 9, q_offset=4, mask_function=masking_utils.causal_mask_function)
    out, _ = kernels.attention_forward(Layer(), q[:, :, :1], k, v, mask)
    alone, _ = kernels.attention_forward(Layer(), q[:, :, :1], k[:, :, :5], v[:, :, :5], None)
    same(out, alone)


@pytest.mark.parametrize("seq_len_q", [1, 4, 9, 12])
def test_queries_of_a_decoder_see_the_tokens_of_an_encoder(seq_len_q: int) -> None:
    """The mask is that of the keys, and says nothing of the queries."""
    q, _, _ = heads(seq_len_q)
    _, k, v = heads(9)
    q, k, v = (x.expand(2, -1, -1, -1) for x in (q, k, v))
    mask = torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
    out, _ = kernels.attention_forward(Layer(), q, k, v, mask, is_causal=False)
    for item, n in enumerate((9, 5)):
        one = slice(item, item + 1)
        alone, _ = kernels.attention_forward(
            Layer(), q[one], k[one, :, :n], v[one, :, :n], None, is_causal=False
        )
        same(out[one], alone)


@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_of_padding_are_zero_in_a_trace_too(is_causal: bool) -> None:
    """What padding holds reaches nothing, and its rows are 0 where the queries are the keys' tokens."""
    q, k, v = (x.expand(2, -1, -1, -1).clone() for x in heads(9))
    tokens = torch.tensor([[True] * 9, [False] * 3 + [True] * 4 + [False] * 2])
    for x in (k, v):
        x.transpose(1, 2)[~tokens] = float("nan")

    def layer(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Tensor:
        return kernels.attention_forward(Layer(), q, k, v, tokens, is_causal=is_causal)[0]

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v, tokens)
    same(compiled, layer(q, k, v, tokens))
    assert compiled[tokens].isfinite().all()
    assert not is_causal or not compiled[~tokens].any()


@torch.no_grad()
@pytest.mark.skipif(transformers.__version__ < "5", reason="Bart makes masks of four dimensions")
def test_an_encoder_with_padding_and_its_decoder() -> None:
    kernels.register()
    config = transformers.BartConfig(
        vocab_size=128, d_model=64, max_position_embeddings=64, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
    )  # fmt: skip
    torch.manual_seed(0)
    exact = transformers.BartForConditionalGeneration(config).eval()
    for parameter in exact.parameters():
        parameter.mul_(4)
    theirs, ours = copy.deepcopy(exact).bfloat16(), copy.deepcopy(exact).bfloat16()
    exact.load_state_dict({key: value.float() for key, value in theirs.state_dict().items()})
    ours.set_attn_implementation(kernels.NAME)
    theirs.set_attn_implementation("eager")
    tokens = torch.arange(2 * 9).view(2, 9) * 7 % 120 + 4
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    logits = [model(tokens, attention_mask=mask).logits for model in (ours, theirs, exact)]
    no_worse(*logits)


def test_what_is_refused_is_named() -> None:
    q, k, v = heads(9)
    with pytest.raises(NotImplementedError, match=r"^output_attentions is"):
        kernels.attention_forward(Layer(), q, k, v, None, output_attentions=True)
    with pytest.raises(NotImplementedError, match=r"^attention_mask has shape"):
        kernels.attention_forward(Layer(), q, k, v, torch.ones(1, 1, 9, 8))
