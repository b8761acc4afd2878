"""Functions of scores and masks: recorded by calling them once with symbols, and computed with PyTorch."""

from flash_attention.mods.block_mask import mask_of_blocks
from flash_attention.mods.combine import and_masks, or_masks
from flash_attention.mods.dense import dense_bias, dense_mask
from flash_attention.mods.randomness import random
from flash_attention.mods.tracing import Traced, trace

__all__ = ["Traced", "and_masks", "dense_bias", "dense_mask", "mask_of_blocks", "or_masks", "random", "trace"]
