"""The public path of ``flash_attention.compat.vllm_flash_attn``: vLLM's flash_attn_varlen_func."""

from flash_attention.compat.vllm_flash_attn import (
    flash_attn_varlen_func,
    get_scheduler_metadata,
)

__all__ = ["flash_attn_varlen_func", "get_scheduler_metadata"]
