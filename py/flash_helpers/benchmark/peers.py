"""The implementations to compare with. Each says why it is not available instead of failing."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flash_helpers.benchmark.implementations import Implementation, Prepared
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class SdpaPeer:
    """PyTorch's ``scaled_dot_product_attention``, with exactly one backend allowed or as it chooses.

    Attributes:
        backend: its name in ``torch.nn.attention.SDPBackend``; empty: what PyTorch chooses.
        deterministic: with PyTorch's switch for deterministic algorithms, which its gradients obey.
    """

    name: str
    backend: str
    devices: tuple[str, ...] = ("cuda",)
    kind: str = "peer"
    deterministic: bool = False

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        """PyTorch's own refusals appear when it is prepared; here: device and mask alignment."""
        if device.type not in self.devices:
            return f"runs on {' and '.join(self.devices)} only"
        if problem.causal and problem.seq_len != problem.seq_len_k:
            return "is_causal aligns the mask top-left when lengths differ"
        return None

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """Views with heads before seq_len, no copies; the backend is chosen outside the call."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        q_view, k_view, v_view = (x.transpose(1, 2) for x in (q, k, v))
        options: dict[str, Any] = {"is_causal": problem.causal}
        if problem.heads_kv != problem.heads:
            options["enable_gqa"] = True

        def call() -> Tensor:
            return scaled_dot_product_attention(q_view, k_view, v_view, **options).transpose(1, 2)

        if not self.backend:
            return Prepared(call)
        backend = getattr(SDPBackend, self.backend)
        if self.deterministic:
            return Prepared(call, lambda: _deterministic(sdpa_kernel(backend)))
        return Prepared(call, lambda: sdpa_kernel(backend))


@contextlib.contextmanager
def _deterministic(inner: AbstractContextManager[Any]) -> Iterator[None]:
    """With PyTorch's switch on; new tensors are not filled, which would be timed as well."""
    import torch

    settings: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        with inner:
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = filled


@dataclass(frozen=True)
class PackagePeer:
    """A function ``f(q, k, v, causal=…)`` on (batch, seq_len, heads, d_head) from an installed package.

    Attributes:
        module: where the function lives.
        package: what to install from PyPI.
        function: its name.
        dtypes: the element types it takes.
    """

    name: str
    module: str
    package: str
    function: str = "flash_attn_func"
    dtypes: tuple[DType, ...] = (DType.FP16, DType.BF16)
    kind: str = "peer"

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        """Installed, on CUDA, and of a dtype that it takes."""
        if device.type != "cuda":
            return "runs on cuda only"
        if not is_installed(self.module):
            return f"not installed (pip install {self.package})"
        if problem.dtype not in self.dtypes:
            return f"takes {', '.join(d.name for d in self.dtypes)} only"
        return None

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """The call as the package documents it; a returned LSE is dropped."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)

        def call() -> Tensor:
            result = function(q, k, v, causal=problem.causal)
            return result[0] if isinstance(result, tuple) else result

        return Prepared(call)


@dataclass(frozen=True)
class FlexPeer:
    """PyTorch's FlexAttention, compiled, with a block mask for causal problems."""

    name: str = "flex"
    kind: str = "peer"

    def unavailable_reason(self, problem: Problem, device: torch.device) -> str | None:
        """It needs CUDA and Triton."""
        if device.type != "cuda":
            return "runs on cuda only"
        if not is_installed("triton"):
            return "not installed (pip install triton)"
        return None

    def prepare(self, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
        """Compiles for these shapes; takes seconds."""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        offset = problem.seq_len_k - problem.seq_len

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return j <= i + offset

        mask = None
        if problem.causal:
            mask = create_block_mask(visible, None, None, problem.seq_len, problem.seq_len_k, device=q.device)
        compiled = torch.compile(flex_attention, dynamic=False)
        q_view, k_view, v_view = (x.transpose(1, 2) for x in (q, k, v))
        grouped = problem.heads_kv != problem.heads

        def call() -> Tensor:
            return compiled(q_view, k_view, v_view, block_mask=mask, enable_gqa=grouped).transpose(1, 2)

        return Prepared(call)


FA3 = PackagePeer("fa3", "fa3_fwd_interface", "fa3-fwd", dtypes=(DType.BF16,))
FA4 = PackagePeer("fa4", "flash_attn.cute", "flash-attn-4")
PEERS: dict[str, Implementation] = {
    peer.name: peer
    for peer in (
        SdpaPeer("fa2", "FLASH_ATTENTION"),
        SdpaPeer("cudnn", "CUDNN_ATTENTION"),
        SdpaPeer("efficient", "EFFICIENT_ATTENTION"),
        SdpaPeer("math", "MATH", devices=("cuda", "cpu")),
        FA3,
        FA4,
        FlexPeer(),
        SdpaPeer("sdpa-cpu", "FLASH_ATTENTION", devices=("cpu",)),
        SdpaPeer("sdpa", "", devices=("cuda", "cpu")),
        SdpaPeer("fa2-deterministic", "FLASH_ATTENTION", deterministic=True),
    )
}
"""All peers by name: the value of ``--peers``."""

DEFAULT_PEERS = ("fa2", "cudnn", "fa3", "fa4", "sdpa-cpu")
"""What is worth running each time; the others are slower, or slow to start."""


def select_peers(text: str) -> list[Implementation]:
    """Reads ``--peers``: names joined by commas, ``all``, ``default`` or ``none``.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    if text == "none":
        return []
    names = list(PEERS) if text == "all" else list(DEFAULT_PEERS) if text == "default" else text.split(",")
    names = list(dict.fromkeys(name.strip() for name in names))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise ValueError(
            f"unknown peer {', '.join(map(repr, unknown))}; known: {', '.join(PEERS)}, all, default, none"
        )
    return [PEERS[name] for name in names]


def is_installed(module: str) -> bool:
    """Whether ``module`` can be found, without importing it; the packages that it lies in are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:  # whatever a package of others raises when it is imported
        return False
