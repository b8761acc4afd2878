"""A model of Hugging Face Transformers whose sequences are spread over the ranks of a group.

    parallel = context_parallel(model, mesh["cp"])
    batch = parallel.batch(Layout.zigzag(input_ids.shape[1], parallel.world), input_ids, labels)
    loss = model(**batch).loss  # this rank's share: the shares of all ranks add up to the loss

All layers but attention work on tokens one by one, so that each rank computes its own; attention takes keys
from the others. What a model asks of attention is computed or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attention.checks.options import given
from flash_attention.compat.transformers.band import Band, UnreadableError, read_band
from flash_attention.compat.transformers.keywords import check_keywords
from flash_attention.compat.transformers.registration import check_supported, supports_flash_attention
from flash_attention.distributed import agreement
from flash_attention.distributed.attention import attention
from flash_attention.distributed.groups import Group, process_group
from flash_attention.distributed.layout import Layout
from flash_attention.distributed.model_parts import (
    Rotation,
    check_loss,
    check_parts,
    check_rotations,
    check_router_loss,
    rotations_of,
)
from flash_attention.distributed.schedule import METHODS, Method
from flash_helpers.messages import named_type

__all__ = ["NAME", "ContextParallel", "context_parallel"]

NAME = "context_parallel_kernels"
"""What a context-parallel model has as its ``attn_implementation``."""
IGNORED = -100  # the label that the loss leaves out
_ATTRIBUTE = "context_parallel_meaning"


@dataclass(frozen=True)
class Meaning:
    """What a mask says, and for which rows."""

    band: Band
    layout: Layout
    parallel: ContextParallel


@dataclass(eq=False)
class ContextParallel:
    """A model that computes with rows of its rank; see ``context_parallel``.

    Attributes:
        group: the ranks.
        method: as in ``flash_attention.distributed.attention``.
        model: the model.
        rotations: those of its rotary embeddings that ranks may not agree on.
    """

    group: dist.ProcessGroup
    method: Method | Literal["auto"] = "auto"
    model: torch.nn.Module | None = field(default=None, repr=False)
    rotations: frozenset[Rotation] = frozenset()
    layout: Layout | None = field(default=None, repr=False)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    def batch(self, layout: Layout, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        """The arguments of the model for this rank's tokens; the next call of the model is of this layout.

        Args:
            layout: which rank holds which tokens; its documents see nothing of one another.
            input_ids: (batch, tokens), all tokens, equal on all ranks.
            labels: likewise, -100 where there is none: each token is to predict the label behind it. The
                model's loss is then a share: their sum over the group is the mean over all labels.

        Raises:
            TypeError, ValueError: a bad argument; the message says what is allowed.
            NotImplementedError: a loss that is no sum over tokens, or rotations that ranks would not share.
        """
        if not isinstance(layout, Layout) or layout.world != self.world:
            raise ValueError(f"layout is {given(layout)}; it must be a Layout of {self.world} ranks")
        for name, x in (("input_ids", input_ids), ("labels", labels)):
            if x is not None and not isinstance(x, Tensor):
                raise TypeError(f"{name} is {given(x)}; it must be a tensor")
            if x is not None and (x.ndim != 2 or x.shape != (input_ids.shape[0], layout.total)):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; it must be (batch, {layout.total}), all tokens of "
                    "the layout on every rank"
                )
        check_rotations(self.rotations, layout)
        if labels is not None and self.model is not None:
            check_loss(self.model)
        self.layout = layout
        tokens = layout.shard(input_ids, self.rank)
        positions = layout.positions(self.rank, input_ids.device)
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": (positions - _starts(layout, positions))[None].expand(tokens.shape[0], -1),
            # With a mask Transformers reads no packed sequences from the positions.
            "attention_mask": torch.ones_like(tokens),
            "use_cache": False,
        }
        if labels is not None:
            shifted = torch.full_like(labels, IGNORED)
            shifted[:, :-1] = labels[:, 1:]
            if layout.documents is not None:  # the last token of a document predicts nothing
                ends = [end - 1 for end in layout.documents[1:] if end]
                shifted[:, ends] = IGNORED
            arguments["labels"] = arguments["shift_labels"] = layout.shard(shifted, self.rank)
            arguments["num_items_in_batch"] = (shifted != IGNORED).sum()
        return arguments


def context_parallel(
    model: torch.nn.Module, group: Group | None = None, *, method: Method | Literal["auto"] = "auto"
) -> ContextParallel:
    """Makes the attention of a model context-parallel, in place.

    Args:
        model: a model of Transformers, before or after ``fully_shard``.
        group: as in ``flash_attention.distributed.attention``.
        method: likewise.

    Returns:
        what makes the batches of a rank.

    Raises:
        TypeError: no model of Transformers.
        ValueError: a model that supports no flash attention, or an unknown method.
        NotImplementedError: a part of the model beside its attention needs tokens of other ranks.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is {named_type(model)}; it must be a model of Transformers")
    if not supports_flash_attention(type(model)):
        raise ValueError(
            f"{type(model).__name__} supports no flash attention, as its _supports_flash_attn says: its "
            "masks or biases are of the whole sequence, and ranks have parts; train it without "
            "context_parallel"
        )
    check_supported(type(model))
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method is {given(method)}; it must be one of auto, {', '.join(METHODS)}")
    check_parts(model)
    parallel = ContextParallel(process_group(group), method, model, rotations_of(model))
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_of)
    model.set_attn_implementation(NAME)
    for handle in _hooks.pop(model, ()):  # of an earlier call
        handle.remove()
    tokens: list[Any] = []

    def before(_: Any, __: Any, arguments: dict[str, Any]) -> None:
        tokens.append(_current.set(parallel))
        with _telling(parallel):
            check_router_loss(model, arguments)

    def behind(*_: Any) -> None:
        _current.reset(tokens.pop())

    _hooks[model] = (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(behind, always_call=True),
    )
    return parallel


_hooks: WeakKeyDictionary[torch.nn.Module, tuple[Any, ...]] = WeakKeyDictionary()
_current: ContextVar[ContextParallel | None] = ContextVar("context_parallel", default=None)


def mask_of(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The mask that ``attention_forward`` gets: which keys a query sees is written on it."""
    parallel = _current.get()
    if parallel is None or parallel.layout is None:
        raise RuntimeError(
            "the model has no batch of a rank: call it with what ContextParallel.batch(layout, input_ids) "
            "gives"
        )
    layout = parallel.layout
    rows = layout.lengths[parallel.rank]
    places = (q_length, kv_length, int(q_offset), kv_offset)
    with _telling(parallel):
        band = _band(rows, places, mask_function, attention_mask)
    mask = torch.ones(
        1, 1, dtype=torch.bool, device=None if attention_mask is None else attention_mask.device
    )
    mask = mask.expand(batch_size, rows)
    setattr(mask, _ATTRIBUTE, Meaning(band, layout, parallel))
    return mask


@contextmanager
def _telling(parallel: ContextParallel) -> Iterator[None]:
    """Tells the other ranks of a refusal, who else would wait for this one."""
    try:
        yield
    except Exception as error:
        agreement.refuse(parallel.group, error, agreement.TIMEOUT)
        raise


def _band(
    rows: int,
    places: tuple[int, int, int, int],
    mask_function: Callable[..., Any] | None,
    attention_mask: Tensor | None,
) -> Band:
    """Which keys a query sees, by the mask function of the model."""
    q_length, kv_length, q_offset, kv_offset = places
    if q_length != rows or kv_length != rows or q_offset or kv_offset:
        raise NotImplementedError(
            f"the model asks for {q_length} queries from place {q_offset} on and {kv_length} keys from "
            f"place {kv_offset} on, and this rank has {rows} rows; context parallelism computes whole "
            "sequences without a cache: pass what ContextParallel.batch gives, with use_cache=False"
        )
    if attention_mask is not None and not attention_mask.all():
        raise NotImplementedError(
            "attention_mask has padding; context parallelism has none: pack the sequences one behind the "
            "other and name their ends, Layout.zigzag(…, documents=…) or Layout.per_document"
        )
    try:
        return Band(right=0) if mask_function is None else read_band(mask_function)
    except UnreadableError as error:
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        raise NotImplementedError(
            f"the mask function {name} of the model is no band around a token's own place ({error}); context "
            "parallelism computes causal masks and windows: packed sequences are documents of the layout"
        ) from error


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, as Transformers calls it: (batch, heads, rows of this rank, d).

    Raises:
        NotImplementedError: what context parallelism does not compute; the message names it.
    """
    meaning: Meaning | None = getattr(attention_mask, _ATTRIBUTE, None)
    if meaning is None:
        raise NotImplementedError(
            f"{type(module).__name__} was called without the mask of its model, so that nothing says which "
            "rows the ranks hold; models that make masks of their own are not supported, nor is reentrant "
            "checkpointing: use torch.utils.checkpoint with use_reentrant=False"
        )
    band, layout = meaning.band, meaning.layout
    with _telling(meaning.parallel):
        # Packed sequences are refused, too: documents are the layout's.
        check_keywords(keywords, "call the model without context_parallel")
        _check_layer(band, layout, sliding_window, is_causal, dropout if module.training else 0.0)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = attention(
        q,
        k,
        v,
        layout=layout,
        group=meaning.parallel.group,
        method=meaning.parallel.method,
        causal=band.right == 0,
        window=(band.left, None if band.right == 0 else band.right),
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        sinks=s_aux if s_aux is None or s_aux.dtype is q.dtype else s_aux.float(),
    )
    assert isinstance(out, Tensor)
    return out, None


def _check_layer(
    band: Band, layout: Layout, sliding_window: int | None, is_causal: bool | None, dropout: float
) -> None:
    """What a layer asks for must be what its mask says."""
    if dropout:
        raise NotImplementedError(
            f"dropout is {dropout}; a sequence that is split drops no weights: set the dropout of attention "
            "to 0 in the model's config (attention_dropout, attn_pdrop, …), or call model.eval()"
        )
    if sliding_window is not None and band.left is None and sliding_window < layout.total:
        raise NotImplementedError(
            f"sliding_window is {sliding_window}, and the mask of this layer has no window; which of the two "
            "the model means is not clear"
        )
    if is_causal is False and band.right == 0:
        raise NotImplementedError("is_causal is False, and the mask of this layer is causal")


def _starts(layout: Layout, positions: Tensor) -> Tensor:
    """Where the document of each position begins."""
    if layout.documents is None:
        return torch.zeros_like(positions)
    ends = torch.tensor(layout.documents, device=positions.device)
    return ends[torch.searchsorted(ends, positions, right=True) - 1]
