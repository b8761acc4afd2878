"""A kernel: one (configuration, traits) pair, and how its id is written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.softmax import SoftmaxReference
from flash_helpers.kernels.traits import PLAIN, ForwardTraits


class ForwardConfig(Protocol):
    """What every configuration of a forward kernel says, whatever its family.

    A configuration is a frozen, ordered dataclass; its classes are listed in ``families.DIRECTIONS``.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def dtype(self) -> DType: ...
    @property
    def d_head(self) -> int: ...
    @property
    def d_head_v(self) -> int: ...
    @property
    def B_r(self) -> int: ...
    @property
    def B_c(self) -> int: ...
    @property
    def kv_stages(self) -> int: ...
    @property
    def n_warps(self) -> int: ...
    @property
    def n_threads(self) -> int: ...
    @property
    def softmax_reference(self) -> SoftmaxReference: ...
    @property
    def optimized_softmax(self) -> bool: ...
    @property
    def writes_lse(self) -> bool: ...
    @property
    def products_per_block(self) -> int: ...
    def short_form(self, include_d_head: bool = True, include_tup: bool = True) -> str: ...
    def to_cpp_struct(self) -> str: ...
    def kernel_name(self) -> str: ...
    def smem_bytes(self, elem_size: int = 2) -> int: ...
    def num_ctas_per_sm(self, max_smem_bytes: int) -> int: ...
    def resident_registers(self) -> int: ...
    def attn_flop(self, batch: int, heads: int, seq_len: int) -> int: ...
    def total_flop(self, batch: int, heads: int, seq_len: int) -> int: ...
    def malformed_reason(self, traits: ForwardTraits = PLAIN) -> str | None: ...
    def infeasible_reason(self, facts: DeviceFacts, traits: ForwardTraits = PLAIN) -> str | None: ...
    def __hash__(self) -> int: ...
    def __lt__(self, other: Any) -> bool: ...


@dataclass(frozen=True, order=True)
class ForwardKernel:
    """One template instantiation of a forward kernel.

    Attributes:
        config: how to compute.
        traits: what the kernel is compiled to be able to do.
    """

    config: ForwardConfig
    traits: ForwardTraits = PLAIN

    @cached_property
    def _hash(self) -> int:
        return hash((self.config, self.traits))

    def __hash__(self) -> int:
        """Worked out once: every call looks its kernel up, and 20 fields take a microsecond to hash."""
        return self._hash

    def malformed_reason(self) -> str | None:
        """Why no GPU can run the configuration compiled for these traits, or None."""
        return self.config.malformed_reason(self.traits)

    def infeasible_reason(self, facts: DeviceFacts) -> str | None:
        """Why the kernel cannot run on a device, or None."""
        return self.config.infeasible_reason(facts, self.traits)

    def short_form(self) -> str:
        """The configuration's id, followed by `` | `` and the traits that are on, if any."""
        traits = self.traits.short_form()
        return f"{self.config.short_form()} | {traits}" if traits else self.config.short_form()
