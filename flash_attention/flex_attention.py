"""The public path of ``flash_attention.compat.flex``: ``flex_attention`` of PyTorch by its name."""

from flash_attention.compat.flex import flex_attention

__all__ = ["flex_attention"]
