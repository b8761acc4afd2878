"""The public path of ``flash_attention.compat.sdpa``."""

from flash_attention.compat.sdpa import flash_attention_operator, register_with_torch, sdpa

__all__ = ["flash_attention_operator", "register_with_torch", "sdpa"]
