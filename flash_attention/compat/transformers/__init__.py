"""Attention of Hugging Face Transformers by this library: ``attn_implementation="flash_attention_kernels"``.

    from flash_attention.integrations import transformers as kernels
    kernels.register()
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation=kernels.NAME, dtype="bfloat16")

What a model's masks and layers ask for is computed or refused by name. Computed are causality, sliding
windows, padding, packed sequences, sinks and the soft cap; other masks and biases of positions as mods.
Padded batches run as packed sequences: padded keys cost nothing, and no result depends on them.
"""

from flash_attention.compat.transformers.forward import attention_forward
from flash_attention.compat.transformers.masks import padding_mask
from flash_attention.compat.transformers.registration import NAME, register

__all__ = ["NAME", "attention_forward", "padding_mask", "register"]
