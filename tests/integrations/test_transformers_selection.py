"""Keys that a layer's indexer has selected: computed as models themselves do for PyTorch's attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5")
kernels = pytest.importorskip("flash_attention.integrations.transformers")

N_TOKENS, N_HEADS, D_HEAD = 12, 2, 16


class Layer(torch.nn.Module):
    is_causal = True

    def __init__(self, block_size: int | None = None) -> None:
        super().__init__()
        self.indexer = torch.nn.Module()
        self.indexer.block_size = block_size  # type: ignore[assignment]


def heads(seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(2, N_HEADS, N_TOKENS, D_HEAD, generator=generator, device="cpu").half()


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize("mask_kind", ["none", "grid"])
@pytest.mark.parametrize("kind", ["keys", "blocks"])
def test_keys_that_an_indexer_has_selected(kind: str, mask_kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (heads(seed) for seed in range(3))
    grid = torch.ones(N_TOKENS, N_TOKENS, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    if mask_kind == "grid":
        grid = grid & (torch.rand(2, 1, 1, N_TOKENS, generator=generator) > 0.2)
    size = 5
    layer = Layer(size)
    if kind == "keys":
        indices = torch.rand(2, N_TOKENS, N_TOKENS, generator=generator).argsort(-1)[..., :6].int()
        selected = torch.zeros(2, N_TOKENS, N_TOKENS, dtype=torch.bool).scatter(-1, indices.long(), True)[
            :, None
        ]
        given: dict[str, Any] = {"indices": indices}
    else:
        indices = torch.tensor([[0, 1], [2, -1], [-1, 0]])[
            torch.randint(0, 3, (2, N_HEADS, N_TOKENS), generator=generator)
        ]
        blocks = torch.arange(N_TOKENS) // size
        selected = (indices[..., None] == blocks).any(-2)
        given = {"block_indices": indices}
    seen = grid & selected
    scores = (q.float() @ k.float().transpose(2, 3)) * D_HEAD**-0.5
    expected = scores.masked_fill(~seen, float("-inf")).softmax(3).nan_to_num(0) @ v.float()
    out, _ = kernels.attention_forward(layer, q, k, v, None if mask_kind == "none" else grid, **given)
    torch.testing.assert_close(out.transpose(1, 2).float(), expected, atol=2e-3, rtol=2e-3)


def test_selections_that_are_not_known_are_refused() -> None:
    x = heads(0)
    few = torch.zeros(2, N_TOKENS - 1, 4, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"indices has shape \(2, 11, 4\).*shape \(2, 12, any\)"):
        kernels.attention_forward(Layer(), x, x, x, None, indices=few)
    blocks = torch.zeros(2, 1, N_TOKENS, 1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"without indexer\.block_size"):
        kernels.attention_forward(Layer(), x, x, x, None, block_indices=blocks)
    layer = Layer(4)
    with pytest.raises(
        NotImplementedError, match=r"block_indices has 3 heads, which do not divide the layer's 2"
    ):
        kernels.attention_forward(layer, x, x, x, None, block_indices=blocks.expand(-1, 3, -1, -1))
