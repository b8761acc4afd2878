"""A kernel family: kernels that share their instructions, and so the GPUs that they run on."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.device_facts import DeviceFacts


@dataclass(frozen=True)
class Family:
    """Where the kernels of one family run.

    Attributes:
        name: the family's name; in C++ its namespace, its folder and ``KernelLibrary::family``.
        first_target: the lowest GPU generation its kernels run on, 80 for sm_80.
        only_target: whether ``first_target`` is also the only one, with instructions that no other
            generation has (compiled for sm_90a, say).
        instructions: these, for messages; empty: none are special.
    """

    name: str
    first_target: int
    only_target: bool = False
    instructions: str = ""

    @property
    def allowed_targets(self) -> str:
        """The targets in words: ``sm_80 and newer``, ``sm_90a only``."""
        return f"sm_{self.arch(self.first_target)} {'only' if self.only_target else 'and newer'}"

    def arch(self, target: int) -> str:
        """The architecture suffix for nvcc: ``80``, or ``90a`` where the family needs it."""
        return f"{target}a" if self.only_target else str(target)

    def runs_on(self, target: int) -> bool:
        """Whether kernels of this family can be compiled for the GPU generation ``target``."""
        return target == self.first_target if self.only_target else target >= self.first_target

    def unable_reason(self, facts: DeviceFacts) -> str | None:
        """Why its kernels do not run on the device, or None."""
        if self.runs_on(facts.target):
            return None
        (major, minor), first = facts.capability, divmod(self.first_target, 10)
        why = f", which has {self.instructions}" if self.instructions else ""
        return (
            f"{facts.name} has compute capability {major}.{minor}; kernels of the {self.name} family run on "
            f"{first[0]}.{first[1]} {'only' if self.only_target else 'and newer'}{why}"
        )

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
