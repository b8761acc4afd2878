"""Which kernel computes a problem, and why: a pure function of problem, device facts and tuning results.

No GPU is asked and nothing is built, so that a choice can be explained and tested anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from flash_attention.errors import NoKernelError
from flash_attention.prediction import predict
from flash_attention.problem import AttentionProblem
from flash_helpers.configs.device_facts import DeviceFacts
from flash_helpers.configs.kernel import ForwardConfig, ForwardKernel
from flash_helpers.configs.traits import ForwardTraits
from flash_helpers.kernel_configs import get_kernels_to_build

# A built kernel runs in place of a better one that would have to be compiled first, if it is expected to
# take at most this many times as long.
GOOD_ENOUGH = 1.5


class TuningDatabase(Protocol):
    """Measured results."""

    def best(self, problem: AttentionProblem, facts: DeviceFacts) -> tuple[ForwardConfig, str] | None:
        """The quickest configuration known for such a problem on such a device, and how it is known."""


@dataclass(frozen=True)
class Rejected:
    """A candidate that was not chosen, and why not."""

    kernel: ForwardKernel
    reason: str


@dataclass(frozen=True)
class Choice:
    """What runs, and why.

    Attributes:
        kernel: the kernel.
        reason: why this one.
        rejected: all other candidates; those that could have run come first, the nearest one first.
    """

    kernel: ForwardKernel
    reason: str
    rejected: tuple[Rejected, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.kernel.short_form()}\n  because {self.reason}"]
        lines += [f"not {r.kernel.short_form()}\n  because {r.reason}" for r in self.rejected]
        return "\n".join(lines)


def select(
    problem: AttentionProblem,
    facts: DeviceFacts,
    database: TuningDatabase | None = None,
    *,
    candidates: Iterable[ForwardConfig] | None = None,
    is_built: Callable[[ForwardKernel], bool] = lambda kernel: True,
) -> Choice:
    """Chooses a kernel: the measured one if the database has the problem, else the quickest by the model.

    Args:
        problem: what to compute.
        facts: the device.
        database: tuning results; None: there are none.
        candidates: configurations to choose from; None: those that are built ahead of time.
        is_built: whether a kernel is there already; a good one that is comes before a better one that is not.

    Raises:
        NoKernelError: no candidate can compute it; the message has the reasons.
    """
    configs = list(get_kernels_to_build() if candidates is None else candidates)
    traits = required_traits(problem)
    able, rejected = [], []
    for config in configs:
        kernel = ForwardKernel(config, traits)
        if reason := unable_reason(config, problem, configs) or config.infeasible_reason(facts):
            rejected.append(Rejected(kernel, reason))
        else:
            able.append((kernel, predict(config, problem, facts)))
    if not able:
        raise NoKernelError(_nothing_fits(problem, facts, rejected))
    able.sort(key=lambda entry: entry[1].seconds)
    best, prediction = able[0]
    basis = f"{prediction.text()}, the least of {len(able)} by the model"
    measured = database.best(problem, facts) if database is not None else None
    if measured is not None and any(kernel.config == measured[0] for kernel, _ in able):
        best, basis = ForwardKernel(measured[0], traits), f"measured to be the quickest: {measured[1]}"

    seconds = {kernel: p.seconds for kernel, p in able}
    chosen, reason = best, basis
    if not is_built(best):
        built = [k for k, p in able if is_built(k) and p.seconds <= GOOD_ENOUGH * seconds[best]]
        if built:
            chosen = built[0]
            reason = (
                f"it is built, while {best.short_form()} ({basis}) would have to be compiled first: "
                "prepare() does that ahead of time"
            )
        else:
            reason += "; it is not built yet, and no built one comes near it"
    slower = [
        Rejected(
            kernel, "it is not built yet" if kernel == best else _compared(p.text(), seconds, kernel, chosen)
        )
        for kernel, p in able
        if kernel != chosen
    ]
    return Choice(chosen, reason, (*slower, *rejected))


def required_traits(problem: AttentionProblem) -> ForwardTraits:
    """What a kernel must be compiled for.

    Raises:
        NoKernelError: kernels know no such feature; the message names it.
    """
    known = {f.name for f in fields(ForwardTraits)}
    wanted = [name for name, on in problem.features().items() if on]
    missing = [name for name in wanted if name not in known]
    if missing:
        raise NoKernelError(
            f"no kernel computes {problem.label()}: none can be compiled for {', '.join(missing)}, only for "
            f"{', '.join(sorted(known))}; CPU tensors take every feature"
        )
    return ForwardTraits(**dict.fromkeys(wanted, True))


def unable_reason(
    config: ForwardConfig, problem: AttentionProblem, configs: Sequence[ForwardConfig]
) -> str | None:
    """Why a configuration cannot compute a problem on any device, or None.

    Head sizes between those of the candidates are padded with zeros to the next one.
    """
    if config.dtype is not problem.dtype:
        return f"it computes in {config.dtype.name}, the tensors are {problem.dtype.name}"
    wanted = max(problem.d_head, problem.d_head_v)
    if config.d_head < wanted:
        return f"its head size is {config.d_head}, the tensors' is {wanted}"
    if any(wanted <= other.d_head < config.d_head for other in configs):
        return f"its head size is {config.d_head}; a smaller one holds the tensors' {wanted}"
    return None


def _compared(
    text: str, seconds: dict[ForwardKernel, float], kernel: ForwardKernel, chosen: ForwardKernel
) -> str:
    return f"{text}: {seconds[kernel] / seconds[chosen]:.2f} times the chosen one's"


def _nothing_fits(problem: AttentionProblem, facts: DeviceFacts, rejected: Sequence[Rejected]) -> str:
    reasons = list(dict.fromkeys(r.reason for r in rejected))
    listed = "".join(f"\n  {reason}" for reason in reasons) or "\n  there are no candidates"
    return (
        f"no kernel computes {problem.label()} on {facts.name}. Reasons of the {len(rejected)} "
        f"candidates:{listed}\nCPU tensors take every head size"
    )
