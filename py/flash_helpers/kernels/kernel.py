"""A kernel: one (configuration, traits) pair, and how its id is written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.hopper.forward.config import HopperForwardKernelConfig
from flash_helpers.kernels.traits import PLAIN, ForwardTraits

ForwardConfig = FlashForwardKernelConfig | HopperForwardKernelConfig


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
