"""``sdpa`` in the place of PyTorch's function, in code written for that: models, layers, autocast."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import attention, sdpa

pytestmark = pytest.mark.only_on("cpu")
PYTORCHS = torch.nn.functional.scaled_dot_product_attention
BF = torch.bfloat16


@contextmanager
def replaced() -> Iterator[list[int]]:
    """PyTorch's function is this library's meanwhile; gives the list of the calls' numbers of keys."""
    calls: list[int] = []

    def ours(*args: Any, **options: Any) -> Tensor:
        calls.append(args[1].shape[-2])
        return sdpa(*args, **options)

    torch.nn.functional.scaled_dot_product_attention = ours
    try:
        yield calls
    finally:
        torch.nn.functional.scaled_dot_product_attention = PYTORCHS


def compare(run: Callable[[], Tensor], bound: float) -> None:
    """Runs once with each function; differences are measured by the largest value."""
    wanted = run().double()
    with replaced() as calls:
        got = run().double()
    assert calls
    assert (got - wanted).abs().max() <= bound * wanted.abs().max()


# ---------------------------------------------------------------------- Transformers
IDS = torch.randint(3, 128, (2, 17), generator=torch.Generator().manual_seed(3))
PADDING = torch.ones_like(IDS)
PADDING[0, :5] = 0
SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": 1,
}  # fmt: skip


@pytest.fixture(params=["llama", "a window"])
def model(request: pytest.FixtureRequest) -> Any:
    """A model in float32 whose attention is ``sdpa``."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if request.param == "llama":
        config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")
        return transformers.LlamaForCausalLM(config)
    config = transformers.MistralConfig(**SIZES, sliding_window=8, attn_implementation="sdpa")
    return transformers.MistralForCausalLM(config)


@torch.no_grad()
def test_a_padded_batch(model: Any) -> None:
    model.to(BF).eval()
    compare(lambda: model(IDS, attention_mask=PADDING).logits[PADDING.bool()], 1e-2)


@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_scores_of_generated_tokens(model: Any, cache: str | None) -> None:
    """Of given tokens, so that a tie of two of them is no difference."""
    options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    model.to(BF).eval()

    def scores() -> Tensor:
        made = model.generate(
            IDS, attention_mask=PADDING, max_new_tokens=5, do_sample=False, output_logits=True,
            return_dict_in_generate=True, prefix_allowed_tokens_fn=lambda item, ids: [7 + len(ids) % 9],
            **options,
        )  # fmt: skip
        return torch.stack(made.logits)

    compare(scores, 1e-2)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["", "checkpoints"])
def test_a_step_of_training(model: Any, checkpoints: bool, autocast: bool) -> None:
    """Under autocast the weights, and the queries behind their rotation, are float32."""
    model.train()
    if not autocast:
        model.to(BF)
    if checkpoints:
        model.gradient_checkpointing_enable()

    def gradients() -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", dtype=BF, enabled=autocast):
            loss = model(IDS, attention_mask=PADDING, labels=IDS).loss
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    compare(gradients, 2e-2)


# ---------------------------------------------------------------------- PyTorch's layers
@torch.no_grad()
def test_layers_of_pytorch() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, dtype=BF).train()
    x = torch.randn(2, 9, 64).to(BF)
    square = torch.nn.Transformer.generate_square_subsequent_mask(9, dtype=BF)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    compare(lambda: layer(x), 1e-2)
    compare(lambda: layer(x, src_mask=square, is_causal=True), 1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare(lambda: layer(x, src_key_padding_mask=padding)[~padding], 1e-2)


# ---------------------------------------------------------------------- autocast
MASK = torch.ones(20, 30).tril(5).bool()


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": MASK},
        {"attn_mask": torch.where(MASK, 0.5, -torch.inf)},
        {"dropout_p": 0.3},
        {"scale": 0.2},
    ],
    ids=["bools", "numbers", "dropout", "plain"],
)
def test_float32_under_autocast_gives_what_16_bits_give(options: dict[str, Any]) -> None:
    makers = [torch.randn(2, 4, n, 32, generator=torch.Generator().manual_seed(n)) for n in (20, 30, 31)]
    makers[2] = makers[2][:, :, :30]
    of_16 = [x.to(BF).requires_grad_() for x in makers]
    of_32 = [x.to(BF).float().requires_grad_() for x in makers]
    torch.manual_seed(5)
    wanted = sdpa(*of_16, **options)
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=BF):
        got = sdpa(*of_32, **options)
    assert torch.equal(got, wanted)
    for out in (got, wanted):
        out.float().square().sum().backward()
    for x, y in zip(of_32, of_16, strict=True):
        assert x.grad is not None
        assert x.grad.dtype is torch.float32
        assert torch.equal(x.grad.to(BF), y.grad)


def test_what_autocast_does_not_convert_is_refused_with_its_types() -> None:
    q = torch.zeros(1, 8, 2, 32, dtype=torch.float64)
    with (
        torch.autocast("cpu", dtype=BF),
        pytest.raises(TypeError, match=r"^the element types are q torch\.float64"),
    ):
        attention(q, q, q, score_mod=lambda score, b, h, q, k: score + k)


# ---------------------------------------------------------------------- what is refused says what to do
def test_a_shared_head_is_not_taken_for_an_exchanged_axis() -> None:
    """As many queries as keys are usual; heads that do not divide are not."""
    query, key = torch.zeros(2, 8, 20, 32, dtype=BF), torch.zeros(2, 2, 20, 32, dtype=BF)
    with pytest.raises(ValueError, match=r"query has 8 heads, key 2; .* only with enable_gqa=True$"):
        sdpa(query, key, key)


def test_a_padding_mask_without_its_axes_is_seen() -> None:
    x = torch.zeros(2, 4, 9, 32, dtype=BF)
    with pytest.raises(ValueError, match=r"pass attn_mask\[:, None, None, :\], if it says which keys"):
        sdpa(x, x, x, attn_mask=torch.ones(2, 9, dtype=torch.bool))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_shown_the_way(layout: torch.layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.zeros(n, 4, 32, dtype=BF) for n in (5, 7)], layout=layout)
    with pytest.raises(
        TypeError, match=r"^query is a nested tensor; .*: flash_attention\.attention_varlen takes"
    ):
        sdpa(nested, nested, nested)
