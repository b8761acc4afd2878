"""What models of Transformers compute beside attention: what a rank cannot know is refused by name.

One process holds all tokens, in another order than that of the sequence: what does not follow from
``position_ids`` and attention would differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

transformers = pytest.importorskip("transformers")

from flash_attention.distributed import Layout  # noqa: E402
from flash_attention.distributed import transformers as models  # noqa: E402
from flash_attention.distributed.model_parts import Rotation, check_rotations, rotations_of  # noqa: E402
from flash_attention.distributed.transformers import context_parallel  # noqa: E402

TOKENS = 40
ORDER = [*range(17, TOKENS), *range(17)]

LLAMA = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
GPT2 = dict(
    vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0,
    embd_pdrop=0.0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
BERT = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    max_position_embeddings=64,
)  # fmt: skip
BART = dict(
    vocab_size=64, d_model=32, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=48,
    encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=48,
)  # fmt: skip
LFM2 = {**LLAMA, "layer_types": ["conv", "full_attention"]}
LFM2.pop("head_dim")
MIXTRAL = {**LLAMA, "num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}
MINIMAX = {**LLAMA, "num_local_experts": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.fixture(autouse=True, scope="module")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(name: str, config: str, options: dict[str, Any]) -> Any:
    if not hasattr(transformers, name):
        pytest.skip(f"this Transformers has no {name}")
    given = getattr(transformers, f"{config}Config")(**options)
    given._attn_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, name)(given).bfloat16().eval()


def tokens() -> Tensor:
    return (torch.arange(2 * TOKENS).view(2, TOKENS) * 7) % 60 + 3


# ---------------------------------------------------------------------- what is kept
@pytest.mark.parametrize(
    ("name", "config", "options"), [("LlamaForCausalLM", "Llama", LLAMA), ("GPT2LMHeadModel", "GPT2", GPT2)]
)
def test_tokens_may_be_in_another_order(name: str, config: str, options: dict[str, Any]) -> None:
    model, layout, ids = make(name, config, options), Layout.explicit([ORDER]), tokens()
    with torch.no_grad():
        wanted = model(ids, labels=ids, use_cache=False)
        parallel = context_parallel(model)
        found = model(**parallel.batch(layout, ids, ids))
    logits = layout.shard(wanted.logits.float(), 0)
    assert (found.logits.float() - logits).norm() < 0.03 * logits.norm()
    assert float(found.loss) == pytest.approx(float(wanted.loss), abs=2e-3)


def test_a_model_may_be_made_context_parallel_again() -> None:
    model, layout, ids = make("LlamaForCausalLM", "Llama", LLAMA), Layout.zigzag(TOKENS, 1), tokens()
    first = context_parallel(model)
    second = context_parallel(model, method="ring")
    with torch.no_grad():
        assert model(**second.batch(layout, ids)).logits.shape[1] == TOKENS
        assert models._current.get() is None
        first.batch(layout, ids)
        second.layout = None
        with pytest.raises(RuntimeError, match="the model has no batch of a rank"):
            model(ids)
    assert models._current.get() is None


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("name", "config", "options", "message"),
    [
        ("Lfm2ForCausalLM", "Lfm2", LFM2, r"is a convolution of \d tokens|has layers of the type conv"),
        ("MiniMaxForCausalLM", "MiniMax", MINIMAX, r"^MiniMaxForCausalLM has layers of the type linear_atte"),
        ("BartForCausalLM", "Bart", BART, r"^BartForCausalLM takes no position_ids, so that its tokens"),
        ("RobertaForMaskedLM", "Roberta", BERT, r"embeddings of RobertaForMaskedLM counts positions from it"),
        ("BertModel", "Bert", BERT, r"^BertModel has a pooler, which reads one token"),
        (
            "LlamaForSequenceClassification",
            "Llama",
            LLAMA,
            r"^LlamaForSequenceClassification reads its answer from some tokens",
        ),
    ],
)
def test_parts_that_need_other_tokens_are_refused(
    name: str, config: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=message):
        context_parallel(make(name, config, options))


def test_states_are_refused() -> None:
    class Stateful(transformers.LlamaForCausalLM):  # type: ignore[name-defined,misc]
        _is_stateful = True

    model = Stateful(transformers.LlamaConfig(**LLAMA))
    with pytest.raises(NotImplementedError, match=r"^Stateful has layers with a state that goes from token"):
        context_parallel(model)


class OwnLoss(transformers.LlamaPreTrainedModel):  # type: ignore[name-defined,misc]
    """A model that takes the mean over the labels that it sees."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = transformers.LlamaModel(config)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Tensor:
        hidden: Tensor = self.model(input_ids, **others).last_hidden_state
        return hidden if labels is None else hidden.float().logsumexp(2)[labels != -100].mean()


def test_losses_that_do_not_add_up_are_refused() -> None:
    layout = Layout.zigzag(TOKENS, 1)
    masked = context_parallel(make("BertForMaskedLM", "Bert", BERT))
    own = context_parallel(OwnLoss(transformers.LlamaConfig(**LLAMA)).bfloat16())
    for parallel, message in (
        (masked, r"^labels are given, and BertForMaskedLM has the loss ForMaskedLM; shares are"),
        (own, r"^labels are given, and OwnLoss does not take its loss from its loss_function"),
    ):
        parallel.batch(layout, tokens())
        with pytest.raises(NotImplementedError, match=message):
            parallel.batch(layout, tokens(), tokens())


def test_the_loss_of_a_router_is_refused() -> None:
    model = make("MixtralForCausalLM", "Mixtral", MIXTRAL)
    parallel = context_parallel(model)
    batch = parallel.batch(Layout.zigzag(TOKENS, 1), tokens(), tokens())
    with pytest.raises(NotImplementedError, match=r"^output_router_logits is True, by which the loss gets"):
        model(**batch)
    assert models._current.get() is None
    assert torch.isfinite(model(**batch, output_router_logits=False).loss)


def test_weights_of_attention_are_refused() -> None:
    """Eager attention would be no advice: it sees a rank's own tokens."""
    model = make("LlamaForCausalLM", "Llama", LLAMA)
    batch = context_parallel(model).batch(Layout.zigzag(TOKENS, 1), tokens())
    with pytest.raises(NotImplementedError, match=r"the weights: call the model without context_parallel$"):
        model(**batch, output_attentions=True)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^method is 'rings'; it must be one of auto, all_gather"):
        context_parallel(make("LlamaForCausalLM", "Llama", LLAMA), method="rings")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- rotations
@pytest.mark.parametrize(
    ("rope", "kind"),
    [({"rope_type": "dynamic", "factor": 2.0}, "dynamic"), (LONG, "longrope")],
)
def test_rotations_that_follow_from_the_length_are_known(rope: dict[str, Any], kind: str) -> None:
    options = {**LLAMA, "rope_scaling": {**rope, "rope_theta": 1e4}, "original_max_position_embeddings": 32}
    if kind == "dynamic":
        options.pop("original_max_position_embeddings")
    (found,) = rotations_of(make("LlamaForCausalLM", "Llama", options))
    assert found == Rotation(kind, 32 if kind == "longrope" else 64)
    assert rotations_of(make("LlamaForCausalLM", "Llama", LLAMA)) == frozenset()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_ranks_rotate_as_the_whole_sequence_does(kind: str) -> None:
    rotations = frozenset({Rotation(kind, 32)})
    check_rotations(rotations, Layout.zigzag(32, 2))  # short for all
    check_rotations(rotations, Layout.zigzag(64, 2, documents=range(0, 65, 32)))  # each document is short
    check_rotations(rotations, Layout.zigzag(40, 1))
    with pytest.raises(NotImplementedError, match=rf"^the model's rope_type is {kind}, .* has 40, and .* 30"):
        check_rotations(rotations, Layout.zigzag(40, 2))  # rank 1 ends at 30
    striped = Layout.striped(40, 2)
    if kind == "longrope":
        check_rotations(rotations, striped)  # both are long
    else:
        with pytest.raises(NotImplementedError, match="take shorter sequences, or another rope_type"):
            check_rotations(rotations, striped)
