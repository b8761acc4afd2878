"""Named sets of Hopper-family kernels: the best of each shape, the ladder, what is built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flash_helpers.kernels.defaults import first_filled
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.hopper.forward.choice import HopperChoice
from flash_helpers.kernels.hopper.forward.choices import CAPPED_CHOICES, CHOICES, FEATURE_CHOICES
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.hopper.forward.ladder import get_hopper_ladder
from flash_helpers.kernels.hopper.forward.mod_choices import (
    COPIED_CHOICES,
    MOD_CHOICES,
    STEP_CHOICES,
    STREAM_CHOICES,
)
from flash_helpers.kernels.hopper.forward.varlen_choices import (
    PACKED_CHOICES,
    PLANNED_CHOICES,
    SPLIT_CHOICES,
    VARLEN_CHOICES,
)
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.kernels.softmax import SoftmaxReference
from flash_helpers.kernels.traits import PLAIN, ForwardTraits


def choose_hopper_kernel(
    dtype: DType,
    d_head: int,
    causal: bool,
    seq_len: int,
    exact: bool = False,
    *,
    d_head_v: int | None = None,
    traits: ForwardTraits = PLAIN,
    n_keys: int | None = None,
    few_blocks_of: int | None = None,
    mod: bool = False,
    dropout: bool = False,
    streams: bool = False,
    steps: bool = False,
    copies: bool = False,
    uneven: bool = False,
) -> tuple[ForwardKernel, str]:
    """The kernel measured best for a problem, and why.

    Args:
        dtype: element type. Choices were measured in bf16; fp16 runs the same instructions.
        d_head: head size of the kernel, one of those in ``CHOICES``.
        causal: whether the mask is causal.
        seq_len: queries a head; rows of a kv head, where grouped heads are packed.
        exact: take the row's true maximum as the reference instead of a lagged one.
        d_head_v: head size of V; None: ``d_head``.
        traits: what else the kernel must be able to do.
        n_keys: keys; None: many.
        few_blocks_of: the least number of queries whose blocks all find an SM of their own; None: there are
            more blocks than SMs.
        mod: whether functions of the user's change its scores or hide keys, or weights are dropped.
        dropout: whether weights are dropped, which leaves four consumers no registers.
        streams: whether functions of the user's read rows of a captured tensor ahead.
        steps: whether they add to a score what grows evenly with the distance, and do no more.
        copies: whether bulk copies bring tiles of these rows.
        uneven: whether some queries see fewer keys than others by a mask that is no trait.

    Raises:
        ValueError: no choice has this head size.
    """
    traits = replace(traits, causal=causal or traits.causal)
    d_head_v = d_head if d_head_v is None else d_head_v
    choices = _choices_for(traits, mod, streams, steps, copies)
    if dropout and not traits.split:
        choices = VARLEN_CHOICES
    limited = traits.causal or traits.window or uneven
    problem = (d_head, d_head_v, limited, seq_len, n_keys, few_blocks_of)
    if fitting := [choice for choice in choices if choice.fits(*problem)]:
        choice, reason = first_filled(fitting, seq_len)
        pairs = choices is COPIED_CHOICES or not mod
        config = choice.config if pairs else replace(choice.config, paired_blocks=False)
        return _kernel(config, dtype, traits, exact, uneven), reason
    known = ", ".join(sorted({_head_sizes(c.d_head, c.d_head_v) for c in choices}))
    given = _head_sizes(d_head, d_head_v)
    raise ValueError(f"no Hopper kernel is chosen for head size {given}; there are choices for {known}")


def _choices_for(
    traits: ForwardTraits, mod: bool, streams: bool, steps: bool, copies: bool
) -> tuple[HopperChoice, ...]:
    """The table for kernels with some traits."""
    if traits.planned:
        return PLANNED_CHOICES
    if traits.split:
        return SPLIT_CHOICES
    if mod and not traits.varlen:
        streamed = COPIED_CHOICES if copies else STREAM_CHOICES
        return streamed if streams else STEP_CHOICES if steps else MOD_CHOICES
    if traits.varlen and (mod or traits != ForwardTraits(causal=traits.causal, varlen=True)):
        return VARLEN_CHOICES
    if traits.varlen:
        return PACKED_CHOICES
    if traits.softcap:
        return CAPPED_CHOICES
    return CHOICES if traits == ForwardTraits(causal=traits.causal) else FEATURE_CHOICES


def _head_sizes(d_head: int, d_head_v: int | None) -> str:
    return str(d_head) if d_head_v in (None, d_head) else f"{d_head}/{d_head_v}"


def _kernel(
    config: HopperForwardKernelConfig, dtype: DType, traits: ForwardTraits, exact: bool, uneven: bool = False
) -> ForwardKernel:
    """The kernel of a choice for one dtype and set of traits.

    Items under a mask, and of sequences of different lengths, differ in length: a counter spreads them,
    static rounds leave blocks idle.
    Exact: the rescale is skipped where it paid on a forerunner (head size 256), and no overlap is forced,
    which lost there.
    """
    uneven = uneven or traits.causal or traits.window or traits.varlen
    config = replace(config, dtype=dtype, dynamic_schedule=uneven)
    if exact:
        skips = config.d_head == 256
        reference = SoftmaxReference.EXACT_SKIP_RESCALE if skips else SoftmaxReference.EXACT
        config = replace(config, softmax_reference=reference, forced_overlap=False)
    return ForwardKernel(config, traits)


def get_hopper_best_kernels(dtypes: Iterable[DType] = (DType.FP16, DType.BF16)) -> list[ForwardKernel]:
    """Every kernel that ``choose_hopper_kernel`` can choose, sorted, each once.

    Args:
        dtypes: element types.

    Returns:
        Kernels of all head sizes, with and without a causal mask.
    """
    return sorted(
        {
            _kernel(choice.config, dtype, ForwardTraits(causal=causal), exact)
            for choice in CHOICES
            for dtype in dtypes
            for causal in ((False, True) if choice.causal is None else (choice.causal,))
            for exact in (False, True)
        }
    )


def get_hopper_kernels_to_build() -> list[ForwardKernel]:
    """What is built ahead of time: the best kernels, and the ladder with and without a causal mask."""
    ladder = {
        ForwardKernel(rung.config, ForwardTraits(causal=causal))
        for causal in (False, True)
        for rung in get_hopper_ladder(causal=causal)
    }
    return sorted({*get_hopper_best_kernels(), *ladder})
