"""The CUDA backend: from a kernel and checked tensors to a launch on the caller's stream.

A kernel is looked for among those that this process has loaded, then in the cache on disk, and is
compiled if it is in neither. After its first call on a device a kernel is one dictionary look-up away.
"""

from __future__ import annotations

import difflib
import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, get_type_hints

import torch

from flash_attention.errors import (
    BindingNotBuiltError,
    CompilerNotFoundError,
    DeviceNotSupportedError,
    KernelLaunchError,
    KernelNotBuiltError,
    NoCudaDeviceError,
)
from flash_helpers import build, environment
from flash_helpers.build.families import FAMILIES, family_of
from flash_helpers.kernel_configs import KNOWN_DEVICES, DeviceFacts, ForwardKernel, ForwardTraits

# Blocks an SM can hold, by compute capability: the driver's properties do not say it (CUDA programming
# guide, "Technical Specifications per Compute Capability").
_BLOCKS_PER_SM = {
    (8, 0): 32,
    (8, 6): 16,
    (8, 7): 16,
    (8, 9): 24,
    (9, 0): 32,
    (10, 0): 32,
    (10, 3): 32,
    (12, 0): 24,
}

# What to do about the errors that have a remedy, by cudaError_t.
_REMEDIES = {
    1: "the kernel does not fit this device; infeasible_reason(device_facts_of(device)) may say why",
    2: "free GPU memory and call again",
    35: "no usable NVIDIA driver: install or update it; CPU tensors run on the CPU backend",
    100: "no CUDA device is there: see CUDA_VISIBLE_DEVICES; CPU tensors run on the CPU backend",
    209: "the kernel is compiled for another GPU generation; build it for this device's",
    801: "the kernel sums rows on the tensor cores (tensor_row_sums), which is too coarse for an LSE; pass "
    "no lse or choose a kernel without",
    700: "a kernel touched memory that is not its own; CUDA is unusable in this process, start a new one",
}
_UNKNOWN_REMEDY = (
    "if an earlier kernel of this process failed, start a new process; else please report this kernel"
)


# ---------------------------------------------------------------- launch
UNBOUNDED = 2**30 - 1  # a side of the window that has no bound


class Features(NamedTuple):
    """The run-time part of what plain attention does not need; see ``flash::ForwardProblem``.

    Attributes:
        d_head_v: head size of v and o.
        window_left, window_right: keys that a query sees beside its own place; ``UNBOUNDED``: all.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: address of (n_heads,) float32 logits, or 0.
        cu_seqlens_q, cu_seqlens_k: addresses of (batch + 1,) int32 offsets, or 0.
        seqused_k: address of (batch,) int32 key counts, or 0.
        lse_stride: with cu_seqlens_q: rows of q in all; lse is (n_heads, lse_stride).
        n_splits: parts that the keys are cut into.
        partial_o: address of (n_splits, batch, n_heads, seq_len_q, d_head_v) float32, or 0.
        partial_lse: address of (n_splits, batch, n_heads, seq_len_q) float32, or 0.
        block_table: address of (batch, max_pages) int32 page numbers, or 0. With it k and v are
            (n_pages, page_size, n_heads_kv, d_head).
        max_pages, page_size: see block_table.
    """

    d_head_v: int
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    softcap: float = 0.0
    sinks: int = 0
    cu_seqlens_q: int = 0
    cu_seqlens_k: int = 0
    seqused_k: int = 0
    lse_stride: int = 0
    n_splits: int = 1
    partial_o: int = 0
    partial_lse: int = 0
    block_table: int = 0
    max_pages: int = 0
    page_size: int = 0


Launch = Callable[..., None]
_launches: dict[int, dict[ForwardKernel, Launch]] = {}  # by device index
_lock = threading.Lock()


def forward(
    kernel: ForwardKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor | None,
    softmax_scale: float,
    features: Features | None = None,
) -> None:
    """Launches ``kernel`` on the current stream of the tensors' device and returns at once.

    The arguments are those that ``flash_attention.checks`` has let pass: nothing is checked here.

    Args:
        kernel: the kernel, built or not.
        q: (batch, seq_len_q, n_heads, d_head), on a CUDA device; any strides whose last is 1.
        k, v: (batch, seq_len_k, n_heads_kv, d_head).
        o: like q; written.
        lse: (batch, n_heads, seq_len_q), float32, contiguous; written. ``None``: not wanted.
        softmax_scale: factor of the scores.
        features: what the kernel's traits need beside that; None for plain and for causal kernels whose
            head sizes are the tensors'.

    Raises:
        KernelNotBuiltError: not built, and it may not or cannot be compiled.
        KernelCompileError: the compiler refused it.
        BindingNotBuiltError: the C++ extension is missing.
        DeviceNotSupportedError: the kernel's family does not run on this device.
        KernelLaunchError: CUDA refused it; the message has CUDA's reason and what to do.
    """
    index = q.get_device()
    if index != _current_device():
        with torch.cuda.device(index):
            return forward(kernel, q, k, v, o, lse, softmax_scale, features)
    try:
        launch = _launches[index][kernel]
    except KeyError:
        launch = _first_launch(kernel, index)
    try:
        launch(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            o.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            _raw_stream(index),
            q.shape,
            k.shape,
            q.stride(),
            k.stride(),
            v.stride(),
            o.stride(),
            softmax_scale,
            *(() if features is None else (features,)),
        )
    except _binding().CudaError as error:
        raise _launch_error(kernel, index, error) from None


def _current_device() -> int:
    # The public way first makes sure that CUDA is started, which a CUDA tensor proves.
    return torch._C._cuda_getDevice()


def _raw_stream(index: int) -> int:
    # The public way makes a Stream object, which takes longer than the launch's own bookkeeping.
    return torch._C._cuda_getCurrentRawStream(index)


def _first_launch(kernel: ForwardKernel, index: int) -> Launch:
    launch = get_kernel(kernel, torch.device("cuda", index)).launch
    _launches.setdefault(index, {})[kernel] = launch
    return launch


def _launch_error(kernel: ForwardKernel, index: int, error: Exception) -> KernelLaunchError:
    text, code = error.args
    facts = device_facts_of(torch.device("cuda", index))
    return KernelLaunchError(
        f"{kernel.short_form()} on cuda:{index} ({facts.name}, compute capability "
        f"{facts.capability[0]}.{facts.capability[1]}): {text}; {_REMEDIES.get(code, _UNKNOWN_REMEDY)}",
        code,
    )


# ---------------------------------------------------------------- kernels
_loaded: dict[tuple[ForwardKernel, int], Any] = {}


def get_kernel(kernel: ForwardKernel, device: torch.device | int | str | None = None) -> Any:
    """The loaded kernel (a ``flash_attention_kernels.Kernel``), ready for launches on ``device``.

    Args:
        kernel: the kernel.
        device: a CUDA device; ``None`` or ``"cuda"``: the current one.

    Raises:
        See ``forward``.
    """
    index = _device_index(device)
    if found := _loaded.get((kernel, index)):
        return found
    with _lock:
        if found := _loaded.get((kernel, index)):
            return found
        facts, family = device_facts_of(index), family_of(kernel)
        target = facts.target
        if not family.runs_on(target):
            raise DeviceNotSupportedError(
                f"cuda:{index} ({facts.name}) is of generation sm_{target}; {kernel.short_form()} is of the "
                f"{family.name} family, which runs on {family.allowed_targets}. "
                f"Choose a configuration of another family, or CPU tensors"
            )
        found = _find_or_build(kernel, target)
        with torch.cuda.device(index):
            try:
                found.load()
            except _binding().CudaError as error:
                raise _launch_error(kernel, index, error) from None
        _loaded[kernel, index] = found
        return found


def load_kernel(kernel: ForwardKernel, target: int) -> Any | None:
    """The kernel for GPU generation ``target`` if this process or the cache has it; compiles nothing.

    Code for an earlier minor revision of the same generation counts, since the GPU runs it.
    """
    binding, cache = _binding(), build.KernelCache()
    targets = family_of(kernel).binary_compatible_targets(target)
    for candidate in targets:
        if found := binding.find(kernel.config, kernel.traits, candidate):
            return found
    for candidate in targets:
        if library := build.find_library(cache, kernel, candidate):
            binding.load_library(str(library))
            return binding.find(kernel.config, kernel.traits, candidate)
    return None


def registered_kernels() -> list[tuple[ForwardKernel, int]]:
    """(kernel, target) of every kernel that this process has loaded."""
    config_types = {family.config.__name__: family.config for family in FAMILIES}
    kernels = []
    for name, values, traits, target in _binding().registered():
        # The binding gives enumerations as numbers.
        types = get_type_hints(config_types[name])
        config = config_types[name](**{field: types[field](value) for field, value in values.items()})
        kernels.append((ForwardKernel(config, ForwardTraits(**traits)), target))
    return kernels


def _find_or_build(kernel: ForwardKernel, target: int) -> Any:
    if found := load_kernel(kernel, target):
        return found
    if not environment.jit_enabled():
        raise _not_built(kernel, target, "compiling on first use is off (FLASH_ATTENTION_JIT=0)")
    print(
        f"flash_attention: compiling {kernel.short_form()} for sm_{target} on first use; "
        "FLASH_ATTENTION_JIT=0 forbids it",
        file=sys.stderr,
        flush=True,
    )
    try:
        (result,) = build.build_kernels([kernel], [target])
    except CompilerNotFoundError as error:
        raise _not_built(kernel, target, str(error)) from error
    _binding().load_library(str(result.path))
    return _binding().find(kernel.config, kernel.traits, target)


def _not_built(kernel: ForwardKernel, target: int, reason: str) -> KernelNotBuiltError:
    targets = family_of(kernel).binary_compatible_targets(target)
    built = {name for name, _ in build.built_kernels(build.KernelCache(), targets)}
    built |= {other.short_form() for other, other_target in registered_kernels() if other_target in targets}
    closest = tuple(difflib.get_close_matches(kernel.short_form(), sorted(built), n=3, cutoff=0.0))
    command = build.build_command(kernel, target)
    listed = "".join(f"\n  {name}" for name in closest) or " none"
    return KernelNotBuiltError(
        f"{kernel.short_form()} is not built for sm_{target}, and {reason}\n"
        f"Closest of the {len(built)} built kernels:{listed}\nTo build it: {command}",
        closest,
        command,
    )


# ---------------------------------------------------------------- devices
def device_facts_of(device: torch.device | int | str | None = None) -> DeviceFacts:
    """The facts of a CUDA device that is there. Rates that the driver does not tell come from the known
    model of the same name, and are 0 for other models.

    Raises:
        NoCudaDeviceError: there is no such CUDA device.
    """
    return _facts_of_index(_device_index(device))


@functools.cache
def _facts_of_index(index: int) -> DeviceFacts:
    p = torch.cuda.get_device_properties(index)
    known = next((facts for facts in KNOWN_DEVICES.values() if facts.name == p.name), None)
    reserved = DeviceFacts.smem_reserved_per_block
    return DeviceFacts(
        name=p.name,
        capability=(p.major, p.minor),
        sm_count=p.multi_processor_count,
        smem_per_sm=p.shared_memory_per_multiprocessor,
        smem_per_block=getattr(
            p, "shared_memory_per_block_optin", p.shared_memory_per_multiprocessor - reserved
        ),
        l2_bytes=p.L2_cache_size,
        threads_per_sm=p.max_threads_per_multi_processor,
        blocks_per_sm=_BLOCKS_PER_SM.get((p.major, p.minor), DeviceFacts.blocks_per_sm),
        dram_bandwidth=known.dram_bandwidth if known else 0.0,
        mma_flops=known.mma_flops if known else 0.0,
        clock_hz=known.clock_hz if known else 0.0,
    )


def _device_index(device: torch.device | int | str | None) -> int:
    if not torch.cuda.is_available():
        raise NoCudaDeviceError(
            "no CUDA device can be used here: torch.cuda.is_available() is false. Check the driver, "
            "CUDA_VISIBLE_DEVICES and that torch is a CUDA build; CPU tensors run on the CPU backend"
        )
    if device is None:
        return torch.cuda.current_device()
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        raise NoCudaDeviceError(f"device {device} is not a CUDA device; pass cuda, cuda:0, …")
    return torch.cuda.current_device() if device.index is None else device.index


# ---------------------------------------------------------------- the extension
@functools.cache
def _binding() -> ModuleType:
    try:
        import flash_attention_kernels
    except ImportError as error:
        raise BindingNotBuiltError(
            f"the extension flash_attention_kernels does not load ({error}). It is built when the package is "
            "installed where there is a C++20 compiler: install g++ 10 or newer, then "
            "pip install --force-reinstall --no-deps flash-attention-kernels; "
            "in a checkout: python setup.py build_ext --inplace"
        ) from error
    return flash_attention_kernels
