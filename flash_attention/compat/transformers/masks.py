"""The mask of a forward pass: which keys are tokens, and, written on it, which of them a query sees.

Transformers calls ``padding_mask`` once in a forward pass for each kind of mask, and hands the result to the
layers. Other flash attentions get the padding alone from it, and take causality and windows from the layer.
Here the mask function decides, as it does for eager attention; what it says is an attribute of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_attention.compat.transformers.band import EVERYTHING, Band, UnreadableError, read_band
from flash_attention.compat.transformers.functions import grid_of, mask_mod_of
from flash_attention.compat.transformers.grid import NoBandError, read_grid
from flash_attention.torch_private import assert_async

# Models in which the result of a padding token reaches the tokens behind it, and how they are refused: whole
# sentences, since a trace takes constants alone.
_CARRIES_PADDING = {
    "recurrent_gemma": (
        "attention_mask has padding before a token, and recurrent_gemma hands its result on in the state of "
        "its recurrent layers, which eager attention fills with other values: pad on the right, or use "
        'attn_implementation="eager"'
    )
}
_HOLES = (
    "attention_mask has padding between the tokens of an item, and the model a sliding window, which would "
    "count it: pad on one side, call the model outside of torch.compile, or use "
    'attn_implementation="sdpa" or "eager"'
)
_ATTRIBUTE = "flash_attention_kernels_meaning"
# Configurations of models that support PyTorch's attention and no flash attention: they may look into a mask,
# or change it, and get the pairs that PyTorch's attention gets.
LOOK_INTO_MASKS: set[type | None] = set()


@dataclass(eq=False)
class Meaning:
    """What the mask of a forward pass says.

    Attributes:
        band: which keys a query sees, were all of them tokens.
        q_length, kv_length: queries and keys that each layer is to hand over.
        n_keys: the first so many keys are used; those behind are a static cache's free rows. The queries are
            the last of the used keys where the band has limits.
        counts: (batch,) int32, n_keys on the device, for a static cache whose filling is a tensor; None: use
            n_keys.
        tokens: (batch, n_keys) bool, False for padding; None: there is none.
        starts: (batch, kv_length) bool, True where a packed sequence starts; None: nothing is packed.
        mask_mod: what a mask that is no band says, beside the others; None: there is none. Places count from
            the first query and the first key.
        score_mod: what a mask of numbers adds to scores; None: nothing.
        memory: what layers computed from this and the next layers need again.
    """

    band: Band
    q_length: int
    kv_length: int
    n_keys: int
    counts: Tensor | None = None
    tokens: Tensor | None = None
    starts: Tensor | None = None
    mask_mod: Callable[..., Any] | None = None
    score_mod: Callable[..., Any] | None = None
    memory: dict[Any, Any] = field(default_factory=dict)

    @property
    def has_mods(self) -> bool:
        """Whether a band, padding and packed sequences do not say all of it."""
        return self.mask_mod is not None or self.score_mod is not None


def meaning_of(mask: Tensor | None) -> Meaning | None:
    """What ``padding_mask`` wrote on ``mask``; None: the mask is none of its."""
    return getattr(mask, _ATTRIBUTE, None)


def padding_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    **given: Any,
) -> Tensor | None:
    """The mask that ``attention_forward`` gets: which keys are tokens, (batch, keys) bool.

    Models that support no flash attention get all pairs, (batch, 1, seq_len_q, keys) bool.

    Args:
        q_length: new tokens of a sequence.
        kv_length: keys that the model hands over, with a static cache more than there are tokens.
        q_offset: tokens before the new ones.
        kv_offset: tokens before the first key that the model hands over.
        mask_function: which keys a query sees. None: the layer says it, as ``attention_forward`` tells, and
            the result is None if all keys are tokens.
        attention_mask: (batch, tokens), False for padding.
        cache_position: (q_length,), the places of the new tokens: Transformers 4 gives it in place of
            q_length and q_offset.
        given: what else Transformers tells its mask functions.

    Raises:
        NotImplementedError: rows of padding would be others than the model expects.
        ValueError: attention_mask has the wrong shape.
    """
    if meaning_of(attention_mask) is not None:
        return attention_mask  # generate() made it before the forward pass
    arguments = dict(given, batch_size=batch_size, kv_length=kv_length, kv_offset=kv_offset)
    if q_length is None:
        assert cache_position is not None, "Transformers gives q_length or cache_position"
        q_length, q_offset = cache_position.shape[0], cache_position[0]
        arguments["cache_position"] = cache_position
    else:
        arguments.update(q_length=q_length, q_offset=q_offset)
    tokens = _tokens(attention_mask, batch_size, kv_length, kv_offset)
    if not torch.compiler.is_compiling():
        q_offset = int(q_offset)
        if tokens is not None and tokens.all():
            tokens = None
    if mask_function is None:
        return tokens
    arguments["mask_function"] = mask_function
    if type(given.get("config")) in LOOK_INTO_MASKS:
        return grid_of(arguments, attention_mask)
    if tokens is not None:
        _check_carried(tokens, getattr(given.get("config"), "model_type", None))
    try:
        band, starts = _read(arguments, (q_offset, kv_offset), tokens)
        meaning = Meaning(band, q_length, kv_length, kv_length, None, tokens, starts)
        _align(meaning, q_offset, kv_offset, batch_size)
        if meaning.tokens is not None and (band.left is not None or (band.right or 0) > 0):
            _check_no_holes(meaning.tokens)
    except NoBandError:
        assert isinstance(q_offset, int)  # a trace is refused in other ways
        meaning = Meaning(EVERYTHING, q_length, kv_length, kv_length)
        meaning.mask_mod = mask_mod_of(arguments, (q_offset, kv_offset), tokens)
    if meaning.tokens is None:
        device = given.get("device", None if cache_position is None else cache_position.device)
        mask = torch.ones(1, 1, dtype=torch.bool, device=device).expand(batch_size, meaning.n_keys)
    else:
        mask = meaning.tokens.clone()
    setattr(mask, _ATTRIBUTE, meaning)
    return mask


def _tokens(attention_mask: Tensor | None, batch_size: int, kv_length: int, kv_offset: int) -> Tensor | None:
    """(batch, kv_length) bool. Keys behind the end of ``attention_mask`` are none, as for Transformers."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[0] not in (1, batch_size):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it must be (batch, tokens), with "
            f"{batch_size} for batch"
        )
    missing = kv_offset + kv_length - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    tokens = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    return tokens.expand(batch_size, -1)


def _read(
    given: dict[str, Any], places: tuple[int | Tensor, int | Tensor], tokens: Tensor | None
) -> tuple[Band, Tensor | None]:
    if torch.compiler.is_compiling():
        # A trace can't go on behind an error of a mask function: ask Transformers first whether this is one
        # of its own that is causal or a window.
        is_plain = given.get("allow_is_causal_skip") or given.get("allow_is_bidirectional_skip")
        size = given.get("local_size")
        if is_plain and (size is None or size < given["kv_length"] + given["kv_offset"]):
            return read_band(given["mask_function"]), None
        if is_plain:  # a window or chunk that reaches beyond the keys
            return Band(right=None if "allow_is_bidirectional_skip" in given else 0), None
        return read_grid(given, places, tokens)
    try:
        return read_band(given["mask_function"]), None
    except UnreadableError:
        return read_grid(given, places, tokens)


def _align(
    meaning: Meaning,
    q_offset: int | Tensor,
    kv_offset: int,
    batch_size: int,
) -> None:
    """Cuts the keys behind the last query's place, so that the last query stands at the last key.

    Raises:
        NoBandError: it does not, whatever is cut.
    """
    if not meaning.band.has_limits:
        return
    end = q_offset + meaning.q_length - kv_offset
    if isinstance(end, Tensor):
        counts = end.reshape(1).to(torch.int32).expand(batch_size).contiguous()
        if meaning.tokens is None:
            meaning.counts = counts
        else:
            used = torch.arange(meaning.kv_length, device=counts.device) < counts[:, None]
            meaning.tokens = meaning.tokens & used
            meaning.counts = counts
        return
    if end > meaning.kv_length or (end < meaning.kv_length and meaning.band.right != 0):
        raise NoBandError("the last query does not stand at the last key")
    meaning.n_keys = end
    if meaning.tokens is not None:
        meaning.tokens = meaning.tokens[:, :end]
        if not torch.compiler.is_compiling() and meaning.tokens.all():
            meaning.tokens = None


def _check_carried(tokens: Tensor, model_type: str | None) -> None:
    """Rows of padding are 0 here, and something else in eager attention."""
    message = _CARRIES_PADDING.get(model_type or "")
    if message is None:
        return
    is_carried = (tokens[:, 1:] & ~tokens[:, :-1]).any()
    if torch.compiler.is_compiling():
        assert_async(~is_carried, message)
    elif is_carried:
        raise NotImplementedError(message)


def _check_no_holes(tokens: Tensor) -> None:
    """A window counts padding between tokens, and packed tokens have none. Raises NoBandError."""
    begins = tokens[:, :1].sum(1) + (tokens[:, 1:] & ~tokens[:, :-1]).sum(1)
    if torch.compiler.is_compiling():
        assert_async((begins <= 1).all(), _HOLES)
    elif (begins > 1).any():
        raise NoBandError("padding between tokens, which a window counts")
