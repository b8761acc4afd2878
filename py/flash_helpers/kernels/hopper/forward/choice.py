"""What a choice of the Hopper family's tables says: a range of problems, its configuration, the reason."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig


@dataclass(frozen=True)
class HopperChoice:
    """The default configuration of a range of problems: what runs unless tuning has found a faster one.

    Attributes:
        d_head: head size.
        max_seq_len: up to this many queries; None: any number.
        causal: for causal problems only, for others only, or (None) for both.
        config: in BF16; with a counter where the mask is causal (``choose_hopper_kernel`` sets it).
        reason: why, with what it was measured on: one H100 80GB HBM3 (2026-11-27 and 28), bf16, 16384 tokens,
            hidden size 2048, cards hot; "(H200)": on one H200,
            h200-head-sizes.json, h200-long.json, and of few blocks, few keys, packed sequences and soft caps
            benchmarks/results/h200-row-candidates.json and -2, and h200-short-sequences.json, which
            benchmarks/row_candidates.py makes.
            Figures are those of the files benchmarks/results/h100-hopper-variants-*.json and, about pairs and
            Q in registers, h100-hopper-pairs.json; what steps gain is in the ladder. Where nothing was
            measured it says so.
        d_head_v: head size of V; None: ``d_head``.
        max_keys: up to this many keys; None: any number.
        few_blocks_of: for problems whose blocks of so many queries all find an SM of their own; None: any.
    """

    d_head: int
    max_seq_len: int | None
    causal: bool | None
    config: HopperForwardKernelConfig
    reason: str
    d_head_v: int | None = None
    max_keys: int | None = None
    few_blocks_of: int | None = None

    def fits(
        self,
        d_head: int,
        d_head_v: int,
        causal: bool,
        seq_len: int,
        n_keys: int | None = None,
        few_blocks_of: int | None = None,
    ) -> bool:
        """Whether it was made for such a problem.

        Args:
            n_keys: None where the number is not known.
            few_blocks_of: the least number of queries whose blocks all find an SM of their own; None: none.
        """
        if self.few_blocks_of is not None and (few_blocks_of is None or few_blocks_of > self.few_blocks_of):
            return False
        if self.max_keys is not None and (n_keys is None or n_keys > self.max_keys):
            return False
        return (
            self.d_head == d_head
            and (self.d_head_v or self.d_head) == d_head_v
            and self.causal in (None, causal)
            and (self.max_seq_len is None or seq_len <= self.max_seq_len)
        )
