"""Bank conflicts of each shared-memory access of a kernel, by its direction's model."""

from __future__ import annotations

from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.kernels.shared_memory import SharedAccess
from flash_helpers.model.of import model_of


def shared_accesses(config: KernelConfig) -> list[SharedAccess]:
    """Every kind of access of one configuration; the worst warp and the worst tile of each."""
    return model_of(config).shared_accesses(config)
