"""What each family's table of defaults says of one problem on one device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from flash_helpers.kernel_configs import choose_hopper_kernel
from flash_helpers.kernels.ampere.forward.choices import CHOICES as AMPERE_CHOICES
from flash_helpers.kernels.ampere.forward.choices import choose_ampere_kernel
from flash_helpers.kernels.ampere.forward.decode import choose_ampere_decode_config
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.forward.choices import CHOICES as HOPPER_CHOICES
from flash_helpers.kernels.hopper.forward.config import CAPABILITY as HOPPER_CAPABILITY
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.select.candidates import head_sizes, kernel_for, split_variant, unable_reason
from flash_helpers.select.prediction import MAX_DECODE_ROWS, parts_of_keys
from flash_helpers.select.problem import AttentionProblem

DECODE_REASON = "few queries over many keys: K and V are read once, and shared memory holds copies under way"
MIN_DECODE_KEYS = 1024  # with fewer, begin and end of a block count more than its copies

# Where memory gives each SM so many bytes a second, two small blocks of the Ampere family on an SM are faster
# than one of the Hopper family: by 4 to 19 % on an H200 (36 GB/s an SM), not on an H100 (25 GB/s; of older
# kernels), head size 128 (benchmarks/results/h200-decode.json, h100-decode.json); at head sizes 64 and 256
# mostly by as much, but for two of 24 cells (h200-decode-64.json, -256.json). With pages it is by 4 to 22 %
# at 64 keys a page and head size 128, by 26 to 63 % at 16 (h200-pages-128-64.json, -128-16.json).
FAST_MEMORY = 30e9


@dataclass(frozen=True)
class FamilyChoice:
    """A family's choice for a problem.

    Attributes:
        kernel: the kernel.
        n_splits: parts that the keys are cut into.
        reason: the table's.
        obstacle: why it cannot run, or None.
    """

    kernel: ForwardKernel
    n_splits: int
    reason: str
    obstacle: str | None


def family_choices(problem: AttentionProblem, facts: DeviceFacts) -> list[FamilyChoice]:
    """The choices of each family that runs on the device, the one that is expected to be faster first.

    That is the family made for the device, but where ``FAST_MEMORY`` says otherwise. Of one family, the
    choice for keys in parts comes first where it makes more than one part. For few queries over many keys
    its configuration is also the better one for whole rows.

    Args:
        problem: the problem as the kernel is given it.
        facts: the device.
    """
    hopper: list[FamilyChoice] = []
    ampere: list[FamilyChoice] = []
    if facts.capability == HOPPER_CAPABILITY and (sizes := _size_for(problem, _hopper_sizes())):
        hopper = _hopper_choices(problem, facts, sizes)
    if facts.capability >= (8, 0) and (sizes := _size_for(problem, _ampere_sizes())):
        ampere = _ampere_choices(problem, facts, sizes[0])
    return ampere + hopper if _small_blocks_read_faster(problem, facts) else hopper + ampere


def _small_blocks_read_faster(problem: AttentionProblem, facts: DeviceFacts) -> bool:
    """Whether the time goes into reading K and V, from a memory that is fast for its number of SMs."""
    return _is_decoding(problem) and facts.dram_bandwidth > FAST_MEMORY * facts.sm_count


def _is_decoding(problem: AttentionProblem) -> bool:
    return problem.seq_len_q <= MAX_DECODE_ROWS and problem.seq_len_k >= MIN_DECODE_KEYS


def _hopper_choices(
    problem: AttentionProblem, facts: DeviceFacts, sizes: tuple[int, int]
) -> list[FamilyChoice]:
    def choose(split: bool) -> tuple[ForwardConfig, str]:
        kernel, reason = choose_hopper_kernel(
            problem.dtype,
            sizes[0],
            problem.causal,
            problem.seq_len_q,
            d_head_v=sizes[1],
            traits=ForwardTraits(**{**problem.features(), "split": split}),
        )
        return kernel.config, reason

    return _split_and_whole(problem, facts, choose(True), choose(False))


def _ampere_choices(problem: AttentionProblem, facts: DeviceFacts, d_head: int) -> list[FamilyChoice]:
    def choose(split: bool) -> tuple[ForwardConfig, str]:
        if split and problem.seq_len_q <= MAX_DECODE_ROWS:
            return choose_ampere_decode_config(problem.dtype, d_head, facts), DECODE_REASON
        kernel, reason = choose_ampere_kernel(
            problem.dtype,
            d_head,
            problem.masked,
            problem.seq_len_q,
            facts.capability,
            lse=problem.lse or split,  # partial results are combined by their LSEs
            exact=split,  # an anchored reference is not to be had for parts
        )
        return kernel.config, reason

    return _split_and_whole(problem, facts, choose(True), choose(False))


def _split_and_whole(
    problem: AttentionProblem,
    facts: DeviceFacts,
    split: tuple[ForwardConfig, str],
    whole: tuple[ForwardConfig, str],
) -> list[FamilyChoice]:
    """The choices of a family, the one for keys in parts only where there is more than one part."""
    found = []
    config, reason = split
    variant = split_variant(kernel_for(config, problem))
    if variant is not None and not _obstacle(config, problem, facts):
        parts = parts_of_keys(variant, problem, facts)
        if parts > 1:
            found.append(FamilyChoice(variant, parts, reason, None))
    for config, reason in (split, whole) if _is_decoding(problem) else (whole,):
        obstacle = _obstacle(config, problem, facts)
        found.append(FamilyChoice(kernel_for(config, problem), 1, reason, obstacle))
    return found


def _obstacle(config: ForwardConfig, problem: AttentionProblem, facts: DeviceFacts) -> str | None:
    return unable_reason(config, problem, [config]) or config.infeasible_reason(facts)


def _size_for(problem: AttentionProblem, sizes: tuple[tuple[int, int], ...]) -> tuple[int, int] | None:
    """The smallest head sizes that hold the problem's."""
    return next((s for s in sizes if s[0] >= problem.d_head and s[1] >= problem.d_head_v), None)


@cache
def _hopper_sizes() -> tuple[tuple[int, int], ...]:
    return tuple(sorted({head_sizes(choice.config) for choice in HOPPER_CHOICES}))


@cache
def _ampere_sizes() -> tuple[tuple[int, int], ...]:
    return tuple(sorted({head_sizes(choice.config) for choice in AMPERE_CHOICES}))
