"""Calls that are differentiated, drawn for a bounded set of kinds, and the kernels that these take on a GPU.

A kind fixes element type, head sizes and features; lengths, heads, masks and layouts are drawn. Drawn again
from the same seed, most calls are the same: so nearly all kernels can be built ahead of the calls, and what
is missing is compiled when a call takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.parsing import parse_kernel_name_into_config
from flash_helpers.kernels.problem import BACKWARD, AttentionProblem
from flash_helpers.select.candidates import unable_reason
from flash_helpers.select.no_kernel import no_kernel
from flash_helpers.test.cases import LAYOUTS, Case
from flash_helpers.test.draws import FEATURES, LENGTHS, LIMITS, OFFSETS, SCALES

HEADS = (
    (64, 64, 8),
    (128, 128, 0),
    (256, 256, 16),
    (192, 128, 0),
    (128, 128, 24),
    (64, 64, 0),
    (256, 256, 0),
)
"""Head sizes of kernels, and how many columns at most a call's heads lack."""


@dataclass(frozen=True)
class Kind:
    """What the calls of one kind share.

    Attributes:
        cut: heads have up to so many columns less; those of v may have any size up to that.
        features: names of traits that are on.
        named: short forms of backward configurations that a call may name, one of each family, of those that
            repeat their bits and of those that need not.
    """

    dtype: DType
    d_head: int
    d_head_v: int
    cut: int
    features: frozenset[str]
    named: dict[bool, tuple[str, ...]] = field(default_factory=dict, compare=False)


def kinds(facts: DeviceFacts) -> list[Kind]:
    """Every set of features with three head sizes, which take turns as the element types do.

    Args:
        facts: the GPU that runs them.
    """
    found = []
    for number, names in enumerate(FEATURES):
        for i in range(3):
            d_head, d_head_v, cut = HEADS[(3 * number + i) % len(HEADS)]
            dtype = (DType.FP16, DType.BF16)[(number + i) % 2]
            kind = Kind(dtype, d_head, d_head_v, cut, frozenset(names.split()))
            found.append(replace(kind, named={same: _named(kind, facts, same) for same in (False, True)}))
    return found


def _named(kind: Kind, facts: DeviceFacts, deterministic: bool) -> tuple[str, ...]:
    """What each family would run for calls of a kind."""
    on = kind.features
    problem = AttentionProblem(
        kind.dtype, 2, 300, 300, 4, 2, kind.d_head - kind.cut, kind.d_head_v - kind.cut,
        left=40 if "window" in on else None,
        right=0 if "causal" in on else 40 if "window" in on else None,
        softcap="softcap" in on,
    ).backward(deterministic)  # fmt: skip
    answers = (direction.defaults(problem, facts) for direction in directions(BACKWARD))
    configs = (answer.whole[0] for answer in answers if answer is not None)
    return tuple(
        config.short_form()
        for config in configs
        if unable_reason(config, problem, [config]) is None and config.infeasible_reason(facts) is None
    )


def kernels_of(drawn: Iterable[Case], facts: DeviceFacts) -> list[Kernel]:
    """The kernels of both passes that some calls take on a GPU."""
    from flash_attention.run.cuda_choice import choice_for

    found: dict[Kernel, None] = {}
    for forward, backward, name in dict.fromkeys(asked for case in drawn if (asked := _problems(case))):
        config = parse_kernel_name_into_config(name) if name else None
        for problem, named in ((forward, None), (backward, config)):
            found[choice_for(problem, facts, facts.name, named, explained=False).kernel] = None
    return list(found)


def _problems(case: Case) -> tuple[AttentionProblem, AttentionProblem, str] | None:
    """Of both passes of a call, and the configuration that the second names; None: it needs no kernel."""
    problem = case.problem
    if no_kernel(problem) is not None:
        return None
    return problem.with_rows_packed(), problem.backward(case.deterministic), case.backward_config


@st.composite
def cases(draw: st.DrawFn, some: Sequence[Kind]) -> Case:
    """A call of one of the kinds."""
    kind = some[draw(st.integers(0, len(some) - 1))]
    layouts = st.sampled_from(LAYOUTS)
    d_head, d_head_v = kind.d_head, kind.d_head_v
    if kind.cut:
        d_head -= 8 * draw(st.integers(1, kind.cut // 8))
        d_head_v = 8 * draw(st.integers(1, d_head_v // 8))
    windowed, seed = "window" in kind.features, draw(st.integers(0, 3))
    case = Case(
        dtype=kind.dtype,
        batch=draw(st.integers(0, 3)),
        seq_len_q=draw(LENGTHS),
        seq_len_k=draw(LENGTHS),
        n_heads_kv=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        d_head=d_head,
        d_head_v=d_head_v,
        causal="causal" in kind.features,
        window=(draw(LIMITS), draw(LIMITS)) if windowed else (None, None),
        softmax_scale=draw(st.sampled_from(SCALES)),
        softcap=draw(st.sampled_from((1.0, 20.0))) if "softcap" in kind.features else 0.0,
        sinks="sinks" in kind.features,
        magnitude=draw(st.sampled_from((1.0, 1.0, 0.0, 4.0))),
        layouts=(draw(layouts), draw(layouts), draw(layouts)),
        seed=seed,
        diagonal_offset=draw(OFFSETS) if windowed else 0,
        gradients=True,
    )
    return replace(case, backward_config=draw(st.sampled_from(("", *kind.named[case.deterministic]))))


def share(first: int, step: int, facts: DeviceFacts) -> st.SearchStrategy[Case]:
    """Calls of every step-th kind from number first on; of all kinds where there are fewer."""
    every = kinds(facts)
    return cases(every[first::step] or every)
