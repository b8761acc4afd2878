"""Attention over sequences that are split across ranks: context parallelism on torch.distributed.

``Layout`` says which rank holds which rows, ``attention`` computes, ``explain_method`` says how and why.
"""

from flash_attention.distributed.attention import attention, explain_method
from flash_attention.distributed.cost import MethodChoice, Prediction, Rates
from flash_attention.distributed.gathering import gather
from flash_attention.distributed.layout import Layout
from flash_attention.distributed.schedule import Message, Schedule, Step
from flash_attention.distributed.tiles import Tile

__all__ = [
    "Layout",
    "Message",
    "MethodChoice",
    "Prediction",
    "Rates",
    "Schedule",
    "Step",
    "Tile",
    "attention",
    "explain_method",
    "gather",
]
