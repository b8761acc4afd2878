"""The problem that ``select`` is asked about, under its public path: a facade over ``kernels.problem``."""

from flash_helpers.kernels.problem import (
    BACKWARD,
    FORWARD,
    HEAD_SIZES,
    UNLIMITED,
    AttentionProblem,
    Window,
    visible_limits,
)

__all__ = ["BACKWARD", "FORWARD", "HEAD_SIZES", "UNLIMITED", "AttentionProblem", "Window", "visible_limits"]
