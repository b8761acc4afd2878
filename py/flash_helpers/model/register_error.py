"""How far predicted registers are from those of compiled kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import median

from flash_helpers.kernels.parsing import parse_kernel_name_into_config
from flash_helpers.model.of import model_of
from flash_helpers.model.recorded import all_recorded
from flash_helpers.model.resources import predict_registers


@dataclass(frozen=True)
class ModelError:
    """How far predictions are from what is known.

    Attributes:
        count: of comparisons.
        median, worst: of the absolute differences.
        worst_case: what the worst one is of.
    """

    count: int
    median: float
    worst: float
    worst_case: str


@lru_cache(1)
def register_error() -> ModelError:
    """Predicted registers against every recorded kernel's.

    Those that follow from a block's threads do not count: they would flatter the prediction.
    """
    differences = []
    for (name, target), facts in all_recorded().items():
        config = parse_kernel_name_into_config(name)
        predicted = predict_registers(config)
        if model_of(config).register_lines(predicted) is not None:
            continue
        differences.append((abs(predicted.total - facts.registers), f"{name}, sm_{target}"))
    worst, case = max(differences, default=(0, ""))
    return ModelError(len(differences), median([d for d, _ in differences] or [0]), worst, case)
