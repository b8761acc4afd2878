"""Why a configuration is as fast as it is: resources, bounds, conflicts, instructions. Needs no GPU."""

from flash_helpers.explain.explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
