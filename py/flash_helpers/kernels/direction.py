"""A direction of a family: everything that the rest of the library asks about its kernels, as one value.

Each folder ``kernels/<family>/<direction>/`` defines one in ``direction.py``; ``families.DIRECTIONS`` lists
them. Code outside these folders asks the direction and never looks which class a configuration has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from flash_helpers.kernels.defaults import Defaults
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.family import Family
from flash_helpers.kernels.gates import MachineCode, common_violations
from flash_helpers.kernels.kernel import ForwardKernel, Kernel, KernelConfig
from flash_helpers.kernels.ladder import Rung, Step
from flash_helpers.kernels.names import Name
from flash_helpers.kernels.problem import FORWARD, AttentionProblem
from flash_helpers.kernels.traits import BackwardTraits, ForwardTraits, Traits

if TYPE_CHECKING:
    from flash_helpers.kernels.cost_model import CostModel

ALL_TRAITS = tuple(f.name for f in fields(ForwardTraits))
ALL_BACKWARD_TRAITS = tuple(f.name for f in fields(BackwardTraits))


@dataclass(frozen=True)
class Ladder:
    """The kernels from a plain one to a fast one.

    Attributes:
        steps: head size to the steps of its ladder, those of both masks.
        climb: (dtype, d_head, causal) to the steps of one mask, each with its configuration.
    """

    steps: Mapping[int, Sequence[Step]]
    climb: Callable[[DType, int, bool], Sequence[Rung[Any]]]


def _none(*_: Any) -> None:
    """No reason, no default."""


def _nothing(*_: Any) -> list[Any]:
    return []


def _every_size(*_: Any) -> bool:
    return True


def _no_mods(_: Any) -> str | None:
    return "kernels of its direction and family take no score_mod and no mask_mod yet; CPU tensors do"


@dataclass(frozen=True, eq=False)
class Direction:
    """One direction of one family.

    Attributes:
        family: where its kernels run.
        names: the configuration dataclass and how its kernels are named; the C++ struct has the same name.
        launcher_header: the header, relative to the include root, that defines ``make_record``.
        make_record: the C++ function template that makes a kernel's record.
        name: ``forward``, say.
        kernel: the class of its kernels, which says what traits they have and what problem a launch takes.
        traits: what its kernels can be compiled for, by the names of ``kernel.traits_type``.
        model: what its kernels cost; None: nothing predicts them, so only a caller's own configuration and a
            tuned table choose one.
        built: what is built ahead of time and listed.
        candidates: the configurations that ``select`` ranks.
        tuned: the configurations that ``tune`` measures.
        sizes: (d_head, d_head_v) that ``defaults`` has kernels for.
        sets: further sets of configurations by name, for ``--kernels``.
        checked: the kernels that the gates look at for a GPU generation.
        violations: what a kernel's machine code lacks.
        counts: what is recorded of a main loop to compare with; None: nothing.
        defaults: what runs for a problem on a device where nothing was measured; None: nothing.
        reads_beyond: whether a kernel reads zeros beyond tensors of these head sizes (``padded_head``).
        unable_reason: why a configuration cannot compute a problem that its sizes and traits allow, or None.
        mod_obstacle: why a configuration cannot be compiled with a mod, or None.
        relieved: a configuration of which a thread holds less, for a mod that this one has no registers for;
            None: there is none.
        neighbours: field to the values that ``explain`` tries; those next to the present one count as near.
        untuned_reason: why the tuner leaves a configuration out that could run, or None.
        variant: what sets configurations of equal blocks apart in the picture of a tuning space; None: there
            is no such picture.
        ladder: see ``Ladder``; None: there is none.
    """

    family: Family
    names: Name[Any]
    launcher_header: str
    make_record: str
    name: str = FORWARD
    kernel: type[Kernel] = ForwardKernel
    traits: tuple[str, ...] = ()
    model: CostModel | None = None
    built: Callable[[], Sequence[Kernel]] = _nothing
    candidates: Callable[[], Sequence[KernelConfig]] = _nothing
    tuned: Callable[[], Sequence[KernelConfig]] = _nothing
    sizes: Callable[[], Iterable[tuple[int, int]]] = _nothing
    sets: Mapping[str, Callable[[], Sequence[KernelConfig]]] = field(default_factory=dict)
    checked: Callable[[int], Sequence[Kernel]] = _nothing
    violations: Callable[[Any, MachineCode], list[str]] = common_violations
    counts: Callable[[MachineCode], dict[str, int]] | None = None
    defaults: Callable[[AttentionProblem, DeviceFacts], Defaults | None] = _none
    reads_beyond: Callable[[Any, tuple[int, int]], bool] = _every_size
    unable_reason: Callable[[Any, AttentionProblem], str | None] = _none
    mod_obstacle: Callable[[Any], str | None] = _no_mods
    relieved: Callable[[Any], Any | None] = _none
    neighbours: Mapping[str, Sequence[int | bool]] = field(default_factory=dict)
    untuned_reason: Callable[[Any], str | None] = _none
    variant: Callable[[Any], str] | None = None
    ladder: Ladder | None = None

    @property
    def config(self) -> type[Any]:
        """The configuration dataclass."""
        return self.names.config

    @property
    def record(self) -> str:
        """The C++ type of a kernel's record."""
        return f"flash::{self.kernel.record}<{self.config.__name__}>"

    def make(self, config: Any, traits: Traits | None = None) -> Kernel:
        """The kernel of a configuration; without traits the plain one."""
        return self.kernel(config, self.kernel.traits_type() if traits is None else traits)

    @property
    def label(self) -> str:
        """The family's name, and the direction's where that is not ``forward``: for files and messages."""
        return self.family.name if self.name == FORWARD else f"{self.family.name}_{self.name}"

    def missing_traits(self, traits: Any) -> tuple[str, ...]:
        """The features of ``traits`` that the kernels do not have: they would ignore them."""
        return tuple(f.name for f in fields(traits) if getattr(traits, f.name) and f.name not in self.traits)
