"""The public path of ``flash_attention.compat.transformers``."""

from flash_attention.compat.transformers import NAME, attention_forward, padding_mask, register

__all__ = ["NAME", "attention_forward", "padding_mask", "register"]
