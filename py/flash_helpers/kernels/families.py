"""What the build needs to know of each kernel family."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.kernels.traits import ForwardTraits


@dataclass(frozen=True)
class KernelFamily:
    """How the kernels of one family are generated and compiled.

    Attributes:
        name: the family's name in C++ (namespace, folder, ``KernelLibrary::family``).
        config: the configuration dataclass; the C++ struct has the same name.
        first_target: the lowest GPU generation its kernels run on, 80 for sm_80.
        only_target: whether ``first_target`` is also the only one, with instructions that no other
            generation has (compiled for sm_90a, say).
        traits: the features its kernels can be compiled for, by the names of ``ForwardTraits``.
    """

    name: str
    config: type
    first_target: int
    only_target: bool = False
    traits: tuple[str, ...] = ()

    @property
    def launcher_header(self) -> str:
        """The header, relative to the include root, that defines ``make_record``."""
        return f"{self.name}/forward/launcher.cuh"

    @property
    def make_record(self) -> str:
        """The C++ function template that makes a kernel's record."""
        return f"flash::{self.name}::make_record"

    @property
    def allowed_targets(self) -> str:
        """The targets in words: ``sm_80 and newer``, ``sm_90a only``."""
        return f"sm_{self.arch(self.first_target)} {'only' if self.only_target else 'and newer'}"

    def missing_traits(self, traits: ForwardTraits) -> tuple[str, ...]:
        """The features of ``traits`` that the family's kernels do not have: they would ignore them."""
        return tuple(f.name for f in fields(traits) if getattr(traits, f.name) and f.name not in self.traits)

    def arch(self, target: int) -> str:
        """The architecture suffix for nvcc: ``80``, or ``90a`` where the family needs it."""
        return f"{target}a" if self.only_target else str(target)

    def runs_on(self, target: int) -> bool:
        """Whether kernels of this family can be compiled for the GPU generation ``target``."""
        return target == self.first_target if self.only_target else target >= self.first_target

    def check_target(self, target: int) -> None:
        """Raises ValueError where the family has no kernels for ``target``."""
        if not self.runs_on(target):
            raise ValueError(
                f"target {target}: kernels of the {self.name} family run on {self.allowed_targets}; "
                "choose a target or a family that fits"
            )

    def binary_compatible_targets(self, target: int) -> list[int]:
        """Targets whose machine code a GPU of generation ``target`` runs, best first.

        Machine code runs on its own and on later minor revisions of the same major generation
        (CUDA programming guide, "Binary compatibility").
        """
        if self.only_target:
            return [target]
        return [other for other in range(target, target // 10 * 10 - 1, -1) if self.runs_on(other)]


ALL_TRAITS = tuple(f.name for f in fields(ForwardTraits))

FAMILIES = (
    KernelFamily(
        "ampere",
        FlashForwardKernelConfig,
        first_target=80,
        traits=ALL_TRAITS,
    ),
    KernelFamily("hopper", HopperForwardKernelConfig, first_target=90, only_target=True, traits=ALL_TRAITS),
)
"""Every family, in the order in which the binding lists them."""


def family_of(kernel: ForwardKernel) -> KernelFamily:
    """The family whose configuration dataclass ``kernel`` carries.

    Raises:
        TypeError: the configuration is of no known class.
    """
    for family in FAMILIES:
        if type(kernel.config) is family.config:
            return family
    known = ", ".join(family.config.__name__ for family in FAMILIES)
    raise TypeError(f"configuration of type {type(kernel.config).__name__}; known: {known}")


def common_family(kernels: Iterable[ForwardKernel]) -> KernelFamily:
    """The one family of all ``kernels``: a kernel library holds kernels of one family.

    Raises:
        ValueError: no kernel, or kernels of several families.
        TypeError: a configuration is of no known class.
    """
    families = {family_of(kernel) for kernel in kernels}
    if len(families) != 1:
        names = ", ".join(sorted(family.name for family in families)) or "none"
        raise ValueError(f"a kernel library holds kernels of exactly one family; given: {names}")
    return families.pop()
