"""The problem that ``select`` is asked about, under its public path: a facade over ``kernels.problem``."""

from flash_helpers.kernels.problem import (
    HEAD_SIZES,
    UNLIMITED,
    AttentionProblem,
    Window,
    visible_limits,
)

__all__ = ["HEAD_SIZES", "UNLIMITED", "AttentionProblem", "Window", "visible_limits"]
