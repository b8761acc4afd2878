"""``register``: makes ``attn_implementation="flash_attention_kernels"`` known to Transformers."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import transformers
from transformers import AttentionInterface, AttentionMaskInterface, modeling_flash_attention_utils
from transformers.modeling_utils import PreTrainedModel

from flash_attention.compat import flash_attn
from flash_attention.compat.transformers import masks
from flash_attention.compat.transformers.forward import attention_forward

NAME = "flash_attention_kernels"
"""What ``attn_implementation=`` takes."""
_ACCEPTED = "_compatible_flash_implementations"  # where a model lists the flash attentions it accepts
_OURS = "of_flash_attention_kernels"  # marks the functions of Transformers that are wrapped here


def register(*model_classes: type[PreTrainedModel]) -> None:
    """Makes ``attn_implementation="flash_attention_kernels"`` known to Transformers; may be called again.

    Models that support neither flash attention nor PyTorch's, as they say in ``_supports_flash_attn`` and
    ``_supports_sdpa``, refuse the name: this library takes the masks and biases that PyTorch's takes.

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
    AttentionMaskInterface.register(NAME, masks.padding_mask)
    _let_transformers_load()
    _let_models_refuse()
    for model_class in model_classes:
        for base in model_class.__mro__:  # the list stands in a base of all heads of a model
            accepted = vars(base).get(_ACCEPTED)
            if accepted is not None and NAME not in accepted:
                setattr(base, _ACCEPTED, [*accepted, NAME])


def _let_transformers_load() -> None:
    """Transformers loads the functions behind every name with "flash" in it, and looks for unknown names on a
    model hub: here the functions are."""
    load = getattr(modeling_flash_attention_utils, "_lazy_imports", None)
    if load is None or hasattr(load, _OURS):
        return

    def load_this_too(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if implementation != NAME:
            return load(implementation, *args, **kwargs)
        functions = [flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func]
        if hasattr(modeling_flash_attention_utils, "_flash_with_kvcache_fn"):  # from Transformers 5 on
            functions.append(flash_attn.flash_attn_with_kvcache)
        return (
            *functions,
            modeling_flash_attention_utils._pad_input,
            modeling_flash_attention_utils._unpad_input,
        )

    setattr(load_this_too, _OURS, True)
    modeling_flash_attention_utils._lazy_imports = load_this_too


def _let_models_refuse() -> None:
    """Transformers asks only for the names of its own flash attentions whether a model supports them."""
    if hasattr(PreTrainedModel.get_correct_attn_implementation, _OURS):
        return
    correct = PreTrainedModel.get_correct_attn_implementation
    adjust = PreTrainedModel._check_and_adjust_attn_implementation

    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if requested_attention == NAME:
            check_supported(type(self))
        return correct(self, requested_attention, *args, **kwargs)

    def _check_and_adjust_attn_implementation(
        self: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if attn_implementation != NAME:
            return adjust(self, attn_implementation, *args, **kwargs)
        # not Transformers' own check, which replaces an implementation that it does not know by another
        check_accepted(type(self))
        name = self.get_correct_attn_implementation(NAME)
        load = modeling_flash_attention_utils.lazy_import_flash_attention
        forced: dict[str, Any] = (
            {"force_import": True} if "force_import" in inspect.signature(load).parameters else {}
        )
        load(NAME, **forced)
        return name

    for function in (get_correct_attn_implementation, _check_and_adjust_attn_implementation):
        setattr(function, _OURS, True)
        setattr(PreTrainedModel, function.__name__, function)


def check_accepted(model_class: type[PreTrainedModel]) -> None:
    """Raises:
    ValueError: the model lists the flash attentions that it accepts, and not this one.
    """
    accepted = getattr(model_class, _ACCEPTED, None)
    if accepted is not None and NAME not in accepted:
        raise ValueError(
            f"{model_class.__name__} lists the flash attentions that it accepts, {', '.join(accepted)}, and "
            f'"{NAME}" is not among them; add it with register({model_class.__name__})'
        )


def check_supported(model_class: type[PreTrainedModel]) -> None:
    """Raises:
    ValueError: the model says that it supports no flash attention, or asks no interface for its attention.
    """
    instead = 'use attn_implementation="sdpa" or "eager"'
    if not (supports_flash_attention(model_class) or getattr(model_class, "_supports_sdpa", False)):
        raise ValueError(
            f"{model_class.__name__} supports no other attention than its own, as its _supports_flash_attn "
            f"and _supports_sdpa say: {instead}"
        )
    if not supports_flash_attention(model_class):
        masks.LOOK_INTO_MASKS.add(model_class.config_class)
    if not model_class._can_set_attn_implementation() or _has_own_classes(model_class):
        raise ValueError(
            f"{model_class.__name__} of Transformers {transformers.__version__} takes its attention from "
            f'classes of its own, which know no "{NAME}": {instead}'
        )


def supports_flash_attention(model_class: type[PreTrainedModel]) -> bool:
    """Whether a model says that its attention needs no more than flash attention has."""
    flags = ("_supports_flash_attn", "_supports_flash_attn_2")
    return any(getattr(model_class, flag, False) for flag in flags)


def _has_own_classes(model_class: type[PreTrainedModel]) -> bool:
    """Whether a table of a model's module names a class of attention for each implementation, as of SAM."""
    tables = (x for x in vars(sys.modules[model_class.__module__]).values() if isinstance(x, dict))
    return any({"eager", "sdpa"} <= table.keys() for table in tables)
