"""The public path of ``flash_attention.compat.sdpa`` and ``flash_attention.compat.torch_registry``."""

from flash_attention.compat.sdpa import sdpa
from flash_attention.compat.torch_registry import (
    IMPLEMENTATION,
    flash_attention_operator,
    prefer_in_torch,
    register_with_torch,
)

__all__ = ["IMPLEMENTATION", "flash_attention_operator", "prefer_in_torch", "register_with_torch", "sdpa"]
