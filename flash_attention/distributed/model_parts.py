"""What a model of Transformers computes beside attention that a rank cannot know: found, and refused by name.

Layers that look at one token at a time compute the same on any rank. States that go from token to token,
convolutions, positions that a model counts by itself, and heads that read one token of the sequence do not.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from flash_attention.distributed.layout import Layout
from flash_attention.distributed.pieces import pieces_of

_MIXING = ("linear", "mamba", "conv", "recurrent", "delta", "ssm")  # in the names of layer types
_OF_ONE_TOKEN = (
    "ForSequenceClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)


def check_parts(model: torch.nn.Module) -> None:
    """Raises:
    NotImplementedError: a part of the model needs tokens of other ranks; the message names it.
    """
    name = type(model).__name__
    for of_one in _OF_ONE_TOKEN:
        if any(base.__name__.endswith(of_one) for base in type(model).__mro__):
            raise NotImplementedError(
                f"{name} reads its answer from some tokens of the whole sequence, and ranks have parts: make "
                "the model without its head context-parallel, and gather its hidden states"
            )
    if getattr(type(model), "_is_stateful", False):
        raise NotImplementedError(
            f"{name} has layers with a state that goes from token to token, as its _is_stateful says; each "
            "rank would begin it anew: context parallelism splits attention alone"
        )
    for part, module in _text_parts(model):
        _check_part(name, part, module)
    # What has positions of its own takes none.
    if not any(_takes_positions(module) for _, module in _text_parts(model) if _is_model(module)):
        raise NotImplementedError(
            f"{name} takes no position_ids, so that its tokens would have the places that they have on their "
            "rank; context parallelism needs those of the sequence"
        )


def _check_part(name: str, part: str, module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Conv1d) and module.kernel_size != (1,):
        raise NotImplementedError(
            f"{part} of {name} is a convolution of {module.kernel_size[0]} tokens, which lie on several "
            "ranks: context parallelism splits attention alone"
        )
    if hasattr(module, "create_position_ids_from_input_ids"):
        raise NotImplementedError(
            f"{part} of {name} counts positions from its padding index on, by tokens that are no padding; "
            "context parallelism counts those of the sequence from 0 on"
        )
    if not _is_model(module):
        return
    config = getattr(module, "config", None)
    for kind in getattr(config, "layer_types", None) or ():
        if isinstance(kind, str) and any(word in kind for word in _MIXING):
            raise NotImplementedError(
                f"{name} has layers of the type {kind}, which go from token to token; each rank would begin "
                "anew: context parallelism splits attention alone"
            )
    if getattr(module, "pooler", None) is not None:
        raise NotImplementedError(
            f"{(part + ' of ') if part else ''}{name} has a pooler, which reads one token of the whole "
            "sequence, and ranks have parts: make the model with add_pooling_layer=False"
        )


def _text_parts(model: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules by which tokens go; towers of images or audio have inputs of their own."""
    yield prefix, model
    for child_name, child in model.named_children():
        if not (_is_model(child) and getattr(child, "main_input_name", "input_ids") != "input_ids"):
            yield from _text_parts(child, f"{prefix}.{child_name}" if prefix else child_name)


def _is_model(module: torch.nn.Module) -> bool:
    from transformers.modeling_utils import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def _takes_positions(module: torch.nn.Module) -> bool:
    return "position_ids" in inspect.signature(type(module).forward).parameters


# ---------------------------------------------------------------------- losses
def check_loss(model: torch.nn.Module) -> None:
    """Raises:
    NotImplementedError: the model's loss is not that of a next token, which the ranks' shares add up to.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    kind: Any = getattr(model, "loss_type", None)
    if LOSS_MAPPING.get(kind, ForCausalLMLoss) is not ForCausalLMLoss:
        raise NotImplementedError(
            f"labels are given, and {type(model).__name__} has the loss {kind}; shares are those of causal "
            "language models: leave labels out, and compute the loss from the logits and "
            "layout.shard(labels, rank)"
        )
    forwards = [inspect.unwrap(f) for base in type(model).__mro__ if (f := vars(base).get("forward"))]
    if not any("loss_function" in f.__code__.co_names for f in forwards if inspect.isfunction(f)):
        raise NotImplementedError(
            f"labels are given, and {type(model).__name__} does not take its loss from its loss_function, "
            "which knows how many labels all ranks have: leave labels out, and compute the loss from the "
            "logits and layout.shard(labels, rank)"
        )


def check_router_loss(model: torch.nn.Module, arguments: dict[str, Any]) -> None:
    """Raises:
    NotImplementedError: the loss has a part that is no sum over tokens.
    """
    asked = arguments.get("output_router_logits")
    if asked is None:
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        asked = getattr(text, "output_router_logits", False)
    if asked and arguments.get("labels") is not None:
        raise NotImplementedError(
            "output_router_logits is True, by which the loss gets a part that balances experts over all "
            "tokens, and ranks have parts; pass output_router_logits=False, or leave labels out and compute "
            "the loss from the logits"
        )


# ---------------------------------------------------------------------- rotations
class Rotation(NamedTuple):
    """Rotary embeddings whose angles follow from the last position that a call has.

    Attributes:
        kind: the ``rope_type`` of Transformers.
        limit: sequences that are longer have other angles.
    """

    kind: str
    limit: int


def rotations_of(model: torch.nn.Module) -> frozenset[Rotation]:
    """Those of a model."""
    found = set()
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                found.add(Rotation(kind, _limit(module, layer)))
    return frozenset(found)


def _limit(module: torch.nn.Module, layer: str | None) -> int:
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if layer is not None:
        parameters = parameters.get(layer, {})
    for limit in (
        parameters.get("original_max_position_embeddings"),
        getattr(config, "original_max_position_embeddings", None),
        getattr(module, "original_max_seq_len", None),
    ):
        if limit is not None:
            return int(limit)
    return 0


def check_rotations(rotations: frozenset[Rotation], layout: Layout) -> None:
    """Raises:
    NotImplementedError: ranks would rotate by other angles than the whole sequence.
    """
    if not rotations or layout.world == 1:
        return
    lengths = [_positions(layout, rank) for rank in range(layout.world) if layout.lengths[rank]]
    whole = max(lengths, default=0)
    for kind, limit in sorted(rotations):
        # longrope has two sets of angles, and takes one for a call; dynamic has one for each length.
        is_whole = [n == whole or (kind == "longrope" and n > limit) for n in lengths]
        if whole > limit and not all(is_whole):
            remedy = "shorter sequences, or another rope_type"
            if kind == "longrope":
                remedy = "a layout by which every rank has late rows, as Layout.striped"
            raise NotImplementedError(
                f"the model's rope_type is {kind}, whose angles are others for sequences of more than "
                f"{limit} tokens; this layout ({layout.name}) has {whole}, and a rank that sees up to "
                f"{min(lengths)} would rotate otherwise: take {remedy}"
            )


def _positions(layout: Layout, rank: int) -> int:
    """One more than the last position of a rank's rows in their documents."""
    starts = layout.documents or (0,)
    return max(piece.positions[-1] + 1 - starts[piece.document] for piece in pieces_of(layout, rank))
