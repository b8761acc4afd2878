"""Attention of Hugging Face Transformers by this library: ``attn_implementation="flash_attention_kernels"``.

    from flash_attention.integrations import transformers as kernels
    kernels.register()
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation=kernels.NAME, dtype="bfloat16")

Padded batches run as packed sequences, so that padded keys cost nothing and no result depends on them. What
is applied is causality, the sliding window and the padding. Masks that a model makes beyond these (image
blocks that see each other, for instance) do not reach any flash attention of Transformers: use "eager" there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.modeling_utils import PreTrainedModel

from flash_attention.attention import attention, attention_varlen
from flash_attention.compat import flash_attn

NAME = "flash_attention_kernels"
_ACCEPTED = "_compatible_flash_implementations"  # where a model lists the flash attentions it accepts


def register(*model_classes: type[PreTrainedModel]) -> None:
    """Makes ``attn_implementation="flash_attention_kernels"`` known to Transformers; may be called again.

    Args:
        model_classes: models that list the flash attentions they accept, such as ``GptOssForCausalLM``; this
            one is added to their lists.

    Raises:
        TypeError: one is no class; nothing is registered then.
    """
    for model_class in model_classes:
        if not isinstance(model_class, type):
            raise TypeError(
                f"register was given {model_class!r}; it takes classes of models, such as GptOssForCausalLM, "
                "and for most models none: call register()"
            )
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, padding_mask)
    _let_transformers_load(NAME)
    for model_class in model_classes:
        for base in model_class.__mro__:  # the list stands in a base of all heads of a model
            accepted = vars(base).get(_ACCEPTED)
            if accepted is not None and NAME not in accepted:
                setattr(base, _ACCEPTED, [*accepted, NAME])


def _let_transformers_load(name: str) -> None:
    """Newer versions of Transformers load the functions behind every name with "flash" in it, and look for
    unknown names on a model hub: here the functions are."""
    load = getattr(modeling_flash_attention_utils, "_lazy_imports", None)
    if load is None or hasattr(load, "loads_flash_attention_kernels"):
        return

    def load_this_too(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation != name:
            return load(implementation, *args, **kwargs)
        functions = [flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func]
        if hasattr(modeling_flash_attention_utils, "_flash_with_kvcache_fn"):  # from Transformers 5 on
            functions.append(flash_attn.flash_attn_with_kvcache)
        return (
            *functions,
            modeling_flash_attention_utils._pad_input,
            modeling_flash_attention_utils._unpad_input,
        )

    load_this_too.loads_flash_attention_kernels = True  # type: ignore[attr-defined]
    modeling_flash_attention_utils._lazy_imports = load_this_too


def padding_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """The mask that ``attention_forward`` gets: which keys are tokens, (batch, tokens) bool; None: all.

    Args:
        q_length: new tokens of a sequence.
        kv_length: keys that the model hands over, with a static cache more than there are tokens.
        q_offset: tokens before the new ones.
        kv_offset: tokens before the first key that the model hands over.
        attention_mask: (batch, tokens), False for padding.
        cache_position: (q_length,), the places of the new tokens: Transformers 4 gives it in place of
            q_length and q_offset.
    """
    if q_length is None:
        assert cache_position is not None, "Transformers gives q_length or cache_position"
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    if attention_mask is None:
        tokens = int(q_offset) + q_length - kv_offset
        if tokens >= kv_length:
            return None
        return torch.ones(batch_size, tokens, dtype=torch.bool, device=getattr(q_offset, "device", None))
    attention_mask = attention_mask[:, -kv_length:].bool()
    if attention_mask.shape[1] == kv_length and attention_mask.all():
        return None
    return attention_mask


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, with the arguments that Transformers passes.

    Args:
        query: (batch, n_heads, seq_len_q, d_head).
        key: (batch, n_heads_kv, seq_len_k, d_head).
        value: like key.
        attention_mask: as ``padding_mask`` gives it.
        sliding_window: a query sees this many tokens, itself among them.
        s_aux: (n_heads,) sinks.
        position_ids: of one sequence that is several in truth, the positions in each.

    Returns:
        out (batch, seq_len_q, n_heads, d_head), and None for the weights, which are never there.

    Raises:
        NotImplementedError: dropout, output_attentions; a mask of four dimensions.
        TypeError: not float16 or bfloat16: load the model with ``dtype="bfloat16"``.
    """
    if dropout:
        raise NotImplementedError(f"dropout is {dropout}; there is none: call model.eval()")
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            'output_attentions is True; use attn_implementation="eager" for the weights'
        )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise NotImplementedError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; only (batch, tokens) is known, for "
            "padding"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    left = None if sliding_window is None else sliding_window - 1
    options: dict[str, Any] = {
        "causal": causal,
        "softmax_scale": scaling,
        "window": (left, None if causal else left),
        "softcap": softcap or 0.0,
        "sinks": s_aux if s_aux is None or s_aux.dtype is q.dtype else s_aux.float(),
    }
    packing = _given_packing(kwargs) or _packing_of_positions(q, k, position_ids, attention_mask)
    if attention_mask is not None:
        return _padded(q, k, v, attention_mask, options), None
    if packing is None:
        out: Any = attention(q, k, v, **options)
    else:
        rows: Any = [x.flatten(0, 1) for x in (q, k, v)]
        out = attention_varlen(*rows, *packing, **options)
    return out.view(*q.shape[:3], v.shape[3]), None


Packing = tuple[Any, ...]  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


def _given_packing(kwargs: dict[str, Any]) -> Packing | None:
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    if any(kwargs.get(name) is None for name in names):
        return None
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = (kwargs[name] for name in names)
    return cu_seqlens_q.int(), cu_seqlens_k.int(), int(longest_q), int(longest_k)


def _packing_of_positions(
    q: Tensor, k: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None
) -> Packing | None:
    """Several sequences in one batch item, whose positions begin anew; None: it is one."""
    seq_len = q.shape[1]
    if position_ids is None or attention_mask is not None or position_ids.ndim != 2:
        return None
    if q.shape[0] != 1 or seq_len == 1 or k.shape[1] != seq_len or torch.compiler.is_compiling():
        return None
    begins = (position_ids[0].diff() != 1).nonzero().flatten() + 1
    if not begins.numel():
        return None
    ends = begins.new_tensor([seq_len])
    offsets = torch.cat((begins.new_zeros(1), begins, ends)).int()
    return offsets, offsets, seq_len, seq_len


def _padded(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, options: dict[str, Any]) -> Tensor:
    """Attention of the rows that are tokens. Where they have an order, out is 0 where q is padding.

    Args:
        tokens: (batch, seq_len_k) bool; where there is an order, the queries are the last seq_len_q of them.
            Without one they may be other tokens altogether, those of a decoder, and all of them are taken.
    """
    seq_len_q, seq_len_k = q.shape[1], tokens.shape[1]
    k, v = k[:, :seq_len_k], v[:, :seq_len_k]  # a static cache has more rows than there are tokens
    is_ordered = options["causal"] or options["window"] != (None, None)
    q_tokens = tokens[:, -seq_len_q:] if is_ordered else tokens.new_ones(q.shape[:2])
    rows: Any = attention_varlen(
        q[q_tokens],
        k[tokens],
        v[tokens],
        _offsets(q_tokens),
        _offsets(tokens),
        seq_len_q,
        seq_len_k,
        **options,
    )
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    out[q_tokens] = rows
    return out


def _offsets(tokens: Tensor) -> Tensor:
    return torch.nn.functional.pad(tokens.sum(1).cumsum(0), (1, 0)).int()
