"""The keywords that Transformers hands to an attention function, beside those that this one takes.

Models pass on whatever their caller gave. A keyword that is not listed here and not None is refused: it may
mean something to the model's eager attention.
"""

from __future__ import annotations

from typing import Any

_LOSS = "of the loss, which is computed behind the layers"
_OUTPUT = "says what the model returns beside the logits"
_CACHE = "of the cache, which the layer has updated already"
_ROTARY = "of the rotary embedding, which the layer has applied already"
_MODEL = "of other modules of the model"

HARMLESS = {
    "num_items_in_batch": _LOSS,
    "labels": _LOSS,
    "shift_labels": _LOSS,
    "return_loss": _LOSS,
    "output_hidden_states": _OUTPUT,
    "output_router_logits": _OUTPUT,
    "return_dict": _OUTPUT,
    "logits_to_keep": _OUTPUT,
    "use_cache": _CACHE,
    "cache_position": _CACHE,
    "past_key_values": _CACHE,
    "past_key_value": _CACHE,
    "layer_past": _CACHE,
    "position_embeddings": _ROTARY,
    "rotary_pos_emb": _ROTARY,
    "cos": _ROTARY,
    "sin": _ROTARY,
    "input_ids": "of the embedding, which the model has looked up already",
    "layer_idx": "the place of the layer",
    "seq_idx": "of state space layers; attention layers are given position_ids or cu_seq_lens_q",
    "synced_gpus": "of generate()",
}


def check_keywords(keywords: dict[str, Any], instead: str = 'use attn_implementation="eager"') -> None:
    """Refuses what may change what attention is.

    Args:
        instead: what to do where a keyword is wanted.

    Raises:
        NotImplementedError: one has a value, and is not known to be harmless.
    """
    if keywords.get("output_attentions"):
        raise NotImplementedError(
            f"output_attentions is {keywords['output_attentions']}; no kernel writes the weights: {instead}"
        )
    for name, value in keywords.items():
        if value is None or name in HARMLESS or name == "output_attentions":
            continue
        said = (
            f"a {value.dtype} tensor of shape {tuple(value.shape)}"
            if hasattr(value, "dtype")
            else repr(value)
        )
        raise NotImplementedError(
            f"{name} is {said}; this library's attention of Transformers has no such argument and leaves "
            f"none out: {instead}, or pass None if the layer can do without it"
        )
