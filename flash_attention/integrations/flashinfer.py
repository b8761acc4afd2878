"""The public path of ``flash_attention.compat.merge_state``: FlashInfer's merge_state and its like."""

from flash_attention.compat.merge_state import (
    merge_state,
    merge_state_in_place,
    merge_states,
)

__all__ = ["merge_state", "merge_state_in_place", "merge_states"]
