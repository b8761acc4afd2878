"""The public path of ``flash_attention.compat.flash_attn_3``: the functions of flash-attn 3."""

from flash_attention.compat.flash_attn_3 import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from flash_attention.compat.flash_attn_3_packed import flash_attn_qkvpacked_func

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
