"""Every mask and score function of attention-gym, made by its own code for sequences of ``SEQ`` tokens.

A row a function: its name, whether it is a mask or a score function, and how to make it of attention-gym's
modules. Nothing of it is copied or changed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

BATCH, HEADS, SEQ = 2, 4, 256


class Case(NamedTuple):
    """A function of attention-gym.

    Attributes:
        name: of the function that makes it.
        kind: ``mask_mod`` or ``score_mod``.
        make: makes it.
        learnt: captured tensors whose gradients are wanted.
    """

    name: str
    kind: str
    make: Callable[[], Any]
    learnt: tuple[Tensor, ...] = ()


def cases(folder: Path, device: str) -> list[Case]:
    """All of them.

    Args:
        folder: a checkout of attention-gym.
        device: where captured tensors lie.
    """
    masks, mods, vsa = _modules(folder)
    rng = torch.Generator("cpu").manual_seed(5)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=rng).to(device)

    def real(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device).requires_grad_()

    ends, intervals = (torch.tensor(x, device=device) for x in ([0, 40, 130, SEQ], [[0, 120], [120, SEQ]]))
    chosen = whole(0, 5, SEQ) == 0
    ancestors = whole(0, 2, SEQ, SEQ) == 0
    tiles, sizes = SEQ // 16, whole(1, 17, SEQ // 16)
    spatial, edges = real(HEADS, 6), real(HEADS, 3, 5)
    q_rope, k_rope = real(BATCH, HEADS, SEQ, 8), real(BATCH, 1, SEQ, 8)
    distances, types_of = whole(0, 6, BATCH, SEQ, SEQ), whole(0, 5, BATCH, SEQ, SEQ, 3)
    lengths = whole(0, 4, BATCH, SEQ, SEQ)
    topk = whole(0, tiles, BATCH, HEADS, tiles, 3)
    block_map = whole(0, 2, BATCH, HEADS, tiles, tiles) == 0
    causal = masks.causal_mask

    def mask(name: str, *args: Any, module: Any = masks) -> Case:
        return Case(name, "mask_mod", lambda: getattr(module, name)(*args))

    def score(name: str, *args: Any, learnt: tuple[Tensor, ...] = (), **options: Any) -> Case:
        shown = name + (", approximate" if options.get("approx") else "")
        return Case(shown, "score_mod", lambda: getattr(mods, name)(*args, **options), learnt)

    return [
        Case("causal_mask", "mask_mod", lambda: causal),
        mask("generate_sliding_window", 40),
        mask("generate_prefix_lm_mask", 100),
        mask("generate_dilated_sliding_window", 32, 2),
        mask("generate_global_sliding_window", 20, chosen),
        mask("batchify_mask_mod", causal, 64),
        mask("generate_doc_mask_mod", causal, ends),
        mask("generate_packed_causal_doc_mask_mod", ends),
        mask("generate_shared_prefix_mask_mod", ends, torch.tensor([0, 0, 0], device=device)),
        mask("generate_vision_cross_attention_mask_mod", intervals, 128),
        mask("generate_block_diffusion_mask", SEQ // 2, 16),
        mask("generate_jetspec_tree_causal_mask_mod", 60, ancestors),
        mask("generate_jetspec_training_mask_mod", 60, 16),
        mask("generate_natten", 16, 16, 5, 5),
        mask("generate_tiled_natten", 16, 16, 5, 5, 4, 4),
        mask("generate_morton_natten", 16, 16, 5, 5),
        mask("generate_sta_mask_mod_2d", (16, 16), (8, 8), (4, 4)),
        mask("generate_sta_mask_mod_3d", (4, 8, 8), (2, 4, 4), (2, 4, 4)),
        mask("generate_spatial_head_mask_mod", 16, 4, 60),
        mask("generate_temporal_head_mask_mod", 16, 4, 60),
        mask("generate_vsa_mask_mod", topk, 16, sizes, module=vsa),
        mask("generate_vsa_block_map_mask_mod", block_map, 16, sizes, module=vsa),
        mask("generate_vsa_padding_mask_mod", sizes, 16, module=vsa),
        score("generate_alibi_bias", HEADS),
        score("generate_tanh_softcap", 2),
        score("generate_tanh_softcap", 2, approx=True),
        score("generate_activation_score_mod"),
        score("generate_sandwich_bias", HEADS, SEQ, device=device),
        score("generate_graphormer_spatial_bias", spatial, distances, learnt=(spatial,)),
        score("generate_graphormer_edge_bias", edges, types_of, lengths, learnt=(edges,)),
        score("generate_mla_rope_score_mod", q_rope, k_rope, HEADS, 0.3, learnt=(q_rope, k_rope)),
    ]  # fmt: skip


def _modules(folder: Path) -> Any:
    """Its modules of masks and mods. The package itself imports libraries for plots, which they lack."""
    sys.path.insert(0, str(folder))
    package = types.ModuleType("attn_gym")
    package.__path__ = [str(folder / "attn_gym")]
    sys.modules["attn_gym"] = package
    from attn_gym import masks, mods  # type: ignore[import-not-found]
    from attn_gym.masks import vsa  # type: ignore[import-not-found]

    return masks, mods, vsa
