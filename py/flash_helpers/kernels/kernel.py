"""A kernel: a configuration with traits and, perhaps, a mod; and how its id is written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.numeric_class import NumericClass
from flash_helpers.kernels.softmax import SoftmaxReference
from flash_helpers.kernels.traits import PLAIN, PLAIN_BACKWARD, BackwardTraits, ForwardTraits, Traits
from flash_helpers.mods.mod import Mod


class KernelConfig(Protocol):
    """What every configuration says, whatever its family and direction.

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
    def n_warps(self) -> int: ...
    @property
    def n_threads(self) -> int: ...
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
    def malformed_reason(self, traits: Any = ...) -> str | None: ...
    def infeasible_reason(self, facts: DeviceFacts, traits: Any = ...) -> str | None: ...
    def __hash__(self) -> int: ...
    def __lt__(self, other: Any) -> bool: ...


class ForwardConfig(KernelConfig, Protocol):
    """What every configuration of a forward kernel says beside that."""

    @property
    def kv_stages(self) -> int: ...
    @property
    def softmax_reference(self) -> SoftmaxReference: ...
    @property
    def numeric_class(self) -> NumericClass: ...
    @property
    def chunk_tiles(self) -> int: ...
    @property
    def mask_groups(self) -> int: ...
    def kept_sums(self, sm_count: int) -> int: ...
    @property
    def optimized_softmax(self) -> bool: ...
    @property
    def writes_lse(self) -> bool: ...


class BackwardConfig(KernelConfig, Protocol):
    """What every configuration of a backward kernel says beside that.

    ``B_r`` are the queries of a tile, ``B_c`` its keys.
    """

    @property
    def deterministic(self) -> bool: ...


@dataclass(frozen=True, order=True)
class Kernel:
    """One template instantiation of a kernel: the base of one class a kind of problem.

    Attributes:
        config: how to compute.
        traits: what the kernel is compiled to be able to do.
        mod: what functions of the user's do to its scores; None: there are none.
    """

    config: Any
    traits: Any
    mod: Mod | None = None

    traits_type: ClassVar[type[Traits]]
    """The class of the traits; in C++ the struct of the same name."""
    record: ClassVar[str]
    """The C++ template of a kernel's record, which has the type of problem that a launch takes."""
    header: ClassVar[str]
    """The header that declares it, relative to the include root."""

    @cached_property
    def _hash(self) -> int:
        return hash((type(self), self.config, self.traits, self.mod))

    def __hash__(self) -> int:
        """Worked out once: every call looks its kernel up, and 20 fields take a microsecond to hash."""
        return self._hash

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Each process hashes text in its own way: a pickled kernel leaves its hash behind."""
        self.__dict__.update({name: value for name, value in state.items() if name != "_hash"})

    def malformed_reason(self) -> str | None:
        """Why no GPU can run the configuration compiled for these traits, or None."""
        reason: str | None = self.config.malformed_reason(self.traits)
        return reason

    def infeasible_reason(self, facts: DeviceFacts) -> str | None:
        """Why the kernel cannot run on a device, or None."""
        reason: str | None = self.config.infeasible_reason(facts, self.traits)
        return reason

    def short_form(self) -> str:
        """The configuration's id, followed by `` | `` and the traits that are on and the mod, if any."""
        name, traits = self.config.short_form(), self.traits.short_form()
        if self.mod is not None:
            traits = f"{traits}+{self.mod.id}" if traits else self.mod.id
        return f"{name} | {traits}" if traits else str(name)


@dataclass(frozen=True, order=True)
class ForwardKernel(Kernel):
    """One template instantiation of a forward kernel, see ``Kernel``."""

    config: ForwardConfig
    traits: ForwardTraits = PLAIN
    mod: Mod | None = None

    traits_type: ClassVar[type[Traits]] = ForwardTraits
    record: ClassVar[str] = "ForwardKernelRecord"
    header: ClassVar[str] = "flash_attention.cuh"

    __hash__ = Kernel.__hash__


@dataclass(frozen=True, order=True)
class BackwardKernel(Kernel):
    """One template instantiation of a backward kernel, see ``Kernel``."""

    config: BackwardConfig
    traits: BackwardTraits = PLAIN_BACKWARD
    mod: Mod | None = None

    traits_type: ClassVar[type[Traits]] = BackwardTraits
    record: ClassVar[str] = "BackwardKernelRecord"
    header: ClassVar[str] = "backward.cuh"

    __hash__ = Kernel.__hash__
