"""Models of Transformers on several ranks: losses and gradients are those of one, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Raised, Ranks
from torch import Tensor

transformers = pytest.importorskip("transformers")

from flash_attention.distributed import Layout  # noqa: E402
from flash_attention.distributed.transformers import ContextParallel, context_parallel  # noqa: E402

TOKENS = 48
ENDS = (0, 20, 48)
MODELS = ("Llama", "Mistral", "Gemma2", "GptOss")


def make(name: str, **options: Any) -> Any:
    """A small model in bfloat16, equal in every process."""
    sizes = dict(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, attention_dropout=0.0,
    )  # fmt: skip
    if name in ("Mistral", "Gemma2", "GptOss"):
        sizes["sliding_window"] = 10
    if name == "GptOss":
        sizes["num_local_experts"] = sizes["num_experts_per_tok"] = 2
    config = getattr(transformers, f"{name}Config")(**{**sizes, **options})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.mul_(2)
            if "sinks" in parameter_name:
                parameter.copy_(torch.randn_like(parameter))
    return model.bfloat16().train()


def tokens() -> tuple[Tensor, Tensor]:
    ids = (torch.arange(2, 2 + 2 * TOKENS).view(2, TOKENS) * 7) % 126 + 2
    labels = ids.clone()
    labels[:, 5] = -100
    return ids, labels


# ---------------------------------------------------------------------- on a rank
def on_rank(name: str, kind: str, documents: tuple[int, ...] | None) -> Any:
    model = make(name)
    parallel = context_parallel(model, method=kind)  # type: ignore[arg-type]
    layout = Layout.zigzag(TOKENS, parallel.world, documents=documents)
    loss = model(**parallel.batch(layout, *tokens())).loss
    loss.backward()
    grads = {n: p.grad.float().numpy() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def refused(kind: str) -> Any:
    model = make("Llama", attention_dropout=0.1 if kind == "dropout" else 0.0)
    parallel = context_parallel(model)
    ids, labels = tokens()
    batch = parallel.batch(Layout.zigzag(TOKENS, dist.get_world_size()), ids, labels)
    if kind == "padding":
        batch["attention_mask"][:, 0] = 0
    if kind == "whole":
        batch = {"input_ids": ids}
    if kind == "packed":
        batch["attention_mask"] = None
    return float(model(**batch).loss)


# ---------------------------------------------------------------------- tests
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.compile)], indirect=True)
@pytest.mark.parametrize("name", MODELS)
def test_the_shares_of_the_ranks_add_up(ranks: Ranks, name: str) -> None:
    documents = ENDS if name == "Llama" else None
    answers = ranks.run(on_rank, name, "ring" if name == "Mistral" else "auto", documents)
    assert not any(isinstance(a, Raised) for a in answers), answers
    model = make(name)
    ids, labels = tokens()
    if documents is None:
        loss = model(ids, labels=labels, use_cache=False).loss
    else:  # each document alone, weighed by its labels
        parts = [(ids[:, a:b], labels[:, a:b]) for a, b in pairwise(documents)]
        counts = [int((y[:, 1:] != -100).sum()) for _, y in parts]
        losses = [model(x, labels=y, use_cache=False).loss for x, y in parts]
        loss = sum(c * x for c, x in zip(counts, losses, strict=True)) / sum(counts)  # type: ignore[assignment]
    loss.backward()
    assert sum(answer[0] for answer in answers) == pytest.approx(float(loss.detach()), abs=2e-3)
    whole = float(sum(p.grad.float().square().sum() for p in model.parameters()) ** 0.5)
    for parameter_name, parameter in model.named_parameters():
        found = sum(torch.from_numpy(answer[1][parameter_name]) for answer in answers)
        wanted = parameter.grad.float()
        far = float((found - wanted).norm())
        assert far < 0.05 * float(wanted.norm()) + 1e-3 * whole, (parameter_name, far, float(wanted.norm()))


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dropout", "dropout is 0.1; a sequence that is split drops no weights"),
        ("padding", "attention_mask has padding; context parallelism has none: pack the sequences"),
        ("whole", "the model asks for 48 queries from place 0 on and 48 keys"),
        ("packed", "is no band around a token's own place"),
    ],
)
def test_what_is_not_computed_is_refused(ranks: Ranks, kind: str, message: str) -> None:
    answers = ranks.run(refused, kind)
    assert all(isinstance(a, Raised) and message in a.message for a in answers), answers


@pytest.mark.parametrize(
    ("total", "labels", "message"),
    [
        (9, None, r"^input_ids has shape \(1, 8\); it must be \(batch, 9\), all tokens of the layout"),
        (8, torch.zeros(1, 9), r"^labels has shape \(1, 9\); it must be \(batch, 8\)"),
        (8, torch.zeros(8), r"^labels has shape \(8,\); it must be \(batch, 8\)"),
    ],
)
def test_a_batch_is_of_the_layout(
    total: int, labels: Tensor | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    parallel = ContextParallel(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        parallel.batch(Layout.zigzag(total, 1), torch.zeros(1, 8, dtype=torch.int64), labels)
    assert parallel.layout is None


def test_models_without_flash_attention_are_refused() -> None:
    config = transformers.T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=1, num_heads=4)
    with pytest.raises(ValueError, match=r"T5Model supports no flash attention"):
        context_parallel(transformers.T5Model(config))
    with pytest.raises(TypeError, match=r"^model is a Linear; it must be a model of Transformers"):
        context_parallel(torch.nn.Linear(2, 2))
