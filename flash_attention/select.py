"""Which kernel computes a problem, and why: a pure function of problem, device facts and tuning results.

No GPU is asked and nothing is built, so that a choice can be explained and tested anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flash_attention.errors import NoKernelError
from flash_attention.prediction import predict
from flash_attention.problem import AttentionProblem
from flash_helpers.build.families import family_of
from flash_helpers.configs.device_facts import DeviceFacts
from flash_helpers.configs.kernel import ForwardConfig, ForwardKernel
from flash_helpers.configs.traits import ForwardTraits
from flash_helpers.kernel_configs import (
    choose_hopper_kernel,
    get_hopper_best_kernels,
    get_kernels_to_build,
)

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
        n_splits: parts that the keys are cut into; 1 unless the kernel has the trait ``split``.
    """

    kernel: ForwardKernel
    reason: str
    rejected: tuple[Rejected, ...] = ()
    n_splits: int = 1

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
    """Chooses a kernel: what was measured to be quickest, else what the model expects to be.

    Args:
        problem: what to compute.
        facts: the device.
        database: tuning results, which come first; None: there are none.
        candidates: configurations to choose from; None: those that are built ahead of time.
        is_built: whether a kernel is there already; a good one that is comes before a better one that is not.

    Raises:
        NoKernelError: no candidate can compute it; the message has the reasons.
    """
    configs = list(default_candidates() if candidates is None else candidates)
    able, rejected = [], []
    for config in configs:
        kernel = kernel_for(config, problem)
        if reason := unable_reason(config, problem, configs) or config.infeasible_reason(facts):
            rejected.append(Rejected(kernel, reason))
            continue
        able.append((kernel, predict(kernel, problem, facts)))
        if (split := split_variant(kernel)) is not None:
            prediction = predict(split, problem, facts)
            if prediction.n_splits > 1:
                able.append((split, prediction))
    if not able:
        raise NoKernelError(_nothing_fits(problem, facts, rejected))
    able.sort(key=lambda entry: entry[1].seconds)
    seconds = {kernel: prediction.seconds for kernel, prediction in able}

    best, basis = able[0][0], f"{able[0][1].text()}, the least of {len(able)} by the model"
    for source in (database, ShippedMeasurements()):
        measured = source.best(problem, facts) if source is not None else None
        if measured is not None and (kernel := kernel_for(measured[0], problem)) in seconds:
            best, basis = kernel, f"measured to be the quickest: {measured[1]}"
            break

    chosen, reason = best, basis
    if not is_built(best):
        limit = GOOD_ENOUGH * max(seconds[best], able[0][1].seconds)
        built = next((k for k, _ in able if seconds[k] <= limit and is_built(k)), None)
        if built is None:
            reason += "; it is not built yet, and no built one comes near it"
        else:
            chosen = built
            reason = (
                f"it is built, while {best.short_form()} ({basis}) would have to be compiled first: "
                "prepare() does that ahead of time"
            )
    others = []
    for kernel, prediction in able:
        if kernel == best != chosen:
            others.append(Rejected(kernel, "it is not built yet"))
        elif kernel != chosen:
            ratio = seconds[kernel] / seconds[chosen]
            others.append(Rejected(kernel, f"{prediction.text()}: {ratio:.2f} times the chosen one's"))
    parts = next(prediction.n_splits for kernel, prediction in able if kernel == chosen)
    return Choice(chosen, reason, (*others, *rejected), parts)


def default_candidates() -> list[ForwardConfig]:
    """The configurations that are built ahead of time, of all families."""
    return [*get_kernels_to_build(), *sorted({kernel.config for kernel in get_hopper_best_kernels()})]


class ShippedMeasurements:
    """The choices that were measured on the cards this library was made on, as a ``TuningDatabase``."""

    MIN_QUERIES = 512  # measured from here on

    def best(self, problem: AttentionProblem, facts: DeviceFacts) -> tuple[ForwardConfig, str] | None:
        """The Hopper family's choice, on Hopper."""
        if facts.capability != (9, 0) or problem.seq_len_q < self.MIN_QUERIES:
            return None
        wanted = (problem.d_head, problem.d_head_v)
        sizes = next((c for c in HOPPER_HEAD_SIZES if c[0] >= wanted[0] and c[1] >= wanted[1]), None)
        if sizes is None:
            return None
        kernel, reason = choose_hopper_kernel(
            problem.dtype,
            sizes[0],
            problem.causal,
            problem.seq_len_q,
            d_head_v=sizes[1],
            traits=ForwardTraits(**problem.features()),
        )
        return kernel.config, reason


# ---------------------------------------------------------------------- who can
def kernel_for(config: ForwardConfig, problem: AttentionProblem) -> ForwardKernel:
    """The configuration compiled for the features of the problem, whether or not its family has them.

    Tensors with smaller heads are taken as they are by families that can, and else padded before the call.
    """
    kernel = ForwardKernel(config, ForwardTraits(**problem.features()))
    wanted = (problem.d_head, problem.d_head_v)
    if wanted != head_sizes(config) and _holds(config, wanted) and "padded_head" in family_of(kernel).traits:
        kernel = replace(kernel, traits=replace(kernel.traits, padded_head=True))
    return kernel


def split_variant(kernel: ForwardKernel) -> ForwardKernel | None:
    """The same kernel with its keys cut into parts, or None where that cannot be compiled."""
    if "split" not in family_of(kernel).traits or getattr(kernel.config, "tensor_row_sums", False):
        return None
    if getattr(getattr(kernel.config, "softmax_reference", None), "name", "") == "ANCHORED":
        return None
    return replace(kernel, traits=replace(kernel.traits, split=True))


def unable_reason(
    config: ForwardConfig, problem: AttentionProblem, configs: Sequence[ForwardConfig]
) -> str | None:
    """Why a configuration cannot compute a problem on any GPU, or None.

    Args:
        config: the candidate.
        problem: the problem.
        configs: all candidates.
    """
    if reason := size_reason(config, problem, configs):
        return reason
    kernel = kernel_for(config, problem)
    family = family_of(kernel)
    if missing := family.missing_traits(kernel.traits):
        return f"kernels of the {family.name} family are not made for {', '.join(missing)}"
    if problem.lse and getattr(config, "tensor_row_sums", False):
        return "it sums the rounded P, which is not exact enough for the LSE that is wanted"
    return None


def size_reason(
    config: ForwardConfig, problem: AttentionProblem, configs: Sequence[ForwardConfig]
) -> str | None:
    """Why element type or head sizes rule a configuration out, or None.

    Tensors whose head size is between those of the candidates are padded with zeros to the next one.
    """
    if config.dtype is not problem.dtype:
        return f"it computes in {config.dtype.name}, the tensors are {problem.dtype.name}"
    wanted = (problem.d_head, problem.d_head_v)
    if not _holds(config, wanted):
        return f"its head size is {_sizes_text(head_sizes(config))}, the tensors' is {_sizes_text(wanted)}"
    for other in configs:
        if type(other) is type(config) and _holds(other, wanted) and head_sizes(other) < head_sizes(config):
            return (
                f"its head size is {_sizes_text(head_sizes(config))}; a smaller one, "
                f"{_sizes_text(head_sizes(other))}, holds the tensors' {_sizes_text(wanted)}"
            )
    return None


def head_sizes(config: ForwardConfig) -> tuple[int, int]:
    """Columns of Q and K, and of V and O."""
    return config.d_head, getattr(config, "d_head_v", config.d_head)


HOPPER_HEAD_SIZES = sorted({head_sizes(kernel.config) for kernel in get_hopper_best_kernels()})


def _holds(config: ForwardConfig, wanted: tuple[int, int]) -> bool:
    return all(has >= needs for has, needs in zip(head_sizes(config), wanted, strict=True))


def _sizes_text(sizes: tuple[int, int]) -> str:
    return str(sizes[0]) if sizes[0] == sizes[1] else f"{sizes[0]}/{sizes[1]}"


def _nothing_fits(problem: AttentionProblem, facts: DeviceFacts, rejected: Sequence[Rejected]) -> str:
    reasons = list(dict.fromkeys(r.reason for r in rejected))
    listed = "".join(f"\n  {reason}" for reason in reasons) or "\n  there are no candidates"
    return (
        f"no kernel computes {problem.label()} on {facts.name}. Reasons of the {len(rejected)} "
        f"candidates:{listed}\nCPU tensors take every feature and head size"
    )
