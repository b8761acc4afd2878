"""The choice of a caller who names the configuration."""

from __future__ import annotations

from flash_attention.errors import InfeasibleConfigError
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.kernels.problem import FORWARD, AttentionProblem
from flash_helpers.select.candidates import kernel_for
from flash_helpers.select.chosen import Choice

INSISTED = "the caller insists on it"


def insisted(problem: AttentionProblem, config: KernelConfig, obstacle: str | None) -> Choice:
    """The choice of a caller who names the configuration: it takes all keys in one go.

    Args:
        obstacle: why the configuration cannot compute the problem, or None.

    Raises:
        InfeasibleConfigError: there is an obstacle.
    """
    if obstacle:
        raise InfeasibleConfigError(
            f"{named(problem)} {config.short_form()} cannot compute {problem.label()}: {obstacle}"
        )
    return Choice(kernel_for(config, problem), INSISTED)


def named(problem: AttentionProblem) -> str:
    """The argument by which a caller insists on a configuration."""
    return "config" if problem.direction == FORWARD else "backward_config"
