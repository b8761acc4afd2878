"""The cost model of a configuration."""

from __future__ import annotations

from flash_helpers.kernels.cost_model import CostModel
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.kernel import KernelConfig


def model_of(config: KernelConfig) -> CostModel:
    """The cost model of a configuration's direction.

    Raises:
        ValueError: the direction has none.
    """
    direction = direction_of(config)
    if direction.model is None:
        raise ValueError(
            f"{direction.label} kernels have no cost model, so nothing of {config.short_form()} can be "
            "predicted; time it, or give its direction a model"
        )
    return direction.model
