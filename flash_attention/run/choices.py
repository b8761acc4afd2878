"""From a problem to the kernel that runs it here: remembered choices, their explanation, building ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from flash_attention.backends import DEVICE_TYPES, backend
from flash_attention.checks import calls as checks
from flash_attention.checks.keywords import named_keywords
from flash_attention.checks.options import checked_scale, given
from flash_attention.checks.tensors import check_fits_device, check_grid, check_output_kind
from flash_attention.checks.tma import page_obstacle, stride_obstacle
from flash_attention.errors import InfeasibleConfigError
from flash_attention.options import Options
from flash_attention.run import launch_cache
from flash_helpers import environment
from flash_helpers.build import CompilerNotFoundError, build_kernels
from flash_helpers.build.nvcc import find_nvcc
from flash_helpers.kernels.ampere.forward.config import FlashForwardKernelConfig
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel
from flash_helpers.results.lookup import TuningResults
from flash_helpers.select.candidates import kernel_for, size_reason, unable_reason
from flash_helpers.select.problem import UNLIMITED, AttentionProblem, Window, visible_limits
from flash_helpers.select.select import Choice, select

LAYOUT = "(batch, seq, heads, d)"
CHOICES_KEPT = 1024  # problems whose choice is remembered

# Keys per step on the CPU: of 64, 128, 256 and 512 the quickest with PyTorch's matrix products (2 cores with
# AVX-512, 512 to 4096 keys, head sizes 64 and 128).
CPU_B_C = 256

INSISTED = "the caller insists on it"


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    causal: bool,
    window: Window,
    softcap: float,
    lse: bool,
    capacity: int | None = None,
    paged: bool = False,
) -> AttentionProblem:
    """The problem of q, k and v, (batch, seq, heads, d), with checked options.

    Args:
        capacity: keys that a cache has room for; None: k is no cache.
        paged: k and v are (n_pages, page_size, n_heads_kv, d).
    """
    batch, seq_len_q, n_heads, d_head = q.shape
    seq_len_k = k.shape[1] if capacity is None else capacity
    left, right = visible_limits(causal, window, seq_len_q, seq_len_k)
    return AttentionProblem(
        dtype=checks.DTYPES[q.dtype],
        batch=batch,
        seq_len_q=seq_len_q,
        seq_len_k=seq_len_k,
        n_heads=n_heads,
        n_heads_kv=k.shape[2],
        d_head=d_head,
        d_head_v=v.shape[3],
        left=left,
        right=right,
        softcap=softcap > 0,
        sinks=sinks is not None,
        varlen=capacity is not None,
        cached=capacity is not None,
        paged=paged,
        lse=lse,
        tma_obstacle=stride_obstacle(q=q, k=k, v=v) or (page_obstacle(k.shape[1]) if paged else None),
    )


@lru_cache(CHOICES_KEPT)
def choose(problem: AttentionProblem, device: torch.device, config: ForwardConfig | None) -> Choice:
    """What runs a problem on a device that is there.

    Args:
        problem: the problem.
        device: where.
        config: the configuration that the caller insists on; None: choose.

    Raises:
        NoKernelError: no kernel computes the problem.
        InfeasibleConfigError: ``config`` does not.
        ValueError: more thread blocks than one launch holds.
    """
    return _choice(problem, device, config, explained=False)


def _choice(
    problem: AttentionProblem, device: torch.device, config: ForwardConfig | None, explained: bool
) -> Choice:
    """As ``choose``; with ``explained``, all other candidates are judged too."""
    if device.type == "cpu":
        return _cpu_choice(problem, config)
    facts = backend("cuda").device_facts_of(device)
    if config is None:
        choice = select(
            problem,
            facts,
            _tuning_results(environment.tuning_db(), environment.cache_dir()),
            is_built=lambda kernel: _is_built(kernel, facts.target),
            may_build=_may_build,
            explained=explained,
        )
    else:
        _check_able(problem, config, unable_reason(config, problem, [config]))
        check_fits_device(config, device)
        choice = Choice(kernel_for(config, problem), INSISTED)
    seen = choice.problem or problem
    check_grid(seen.batch, seen.n_heads, seen.seq_len_q, choice.kernel.config.B_r)
    return choice


@lru_cache(1)
def _tuning_results(path: Path | None, folder: Path) -> TuningResults:
    """The results of one file, which stay read while it does not change.

    Args:
        path, folder: where the file is sought; they tell one set of results from another.
    """
    return TuningResults(path)


_built: set[tuple[ForwardKernel, int]] = set()  # seen once in memory or in the cache


def _is_built(kernel: ForwardKernel, target: int) -> bool:
    if (kernel, target) in _built:
        return True
    if backend("cuda").load_kernel(kernel, target) is None:
        return False
    _built.add((kernel, target))
    return True


def _may_build() -> bool:
    """Whether this machine compiles kernels on first use."""
    if not environment.jit_enabled():
        return False
    try:
        find_nvcc()
    except CompilerNotFoundError:
        return False
    return True


def _cpu_choice(problem: AttentionProblem, config: ForwardConfig | None) -> Choice:
    if config is not None:
        # The CPU backend has every feature, whatever the kernels of the family have.
        _check_able(problem, config, size_reason(config, problem, [config]))
        return Choice(kernel_for(config, problem), INSISTED)
    # Only B_c and the softmax variant have an influence on what the CPU backend computes.
    config = FlashForwardKernelConfig(
        problem.dtype, problem.d_head, 64, CPU_B_C, 4, False, False, False, 0, 0, 0, False, True
    )
    against = backend("cpu_fused").reason_against(
        problem.d_head, problem.d_head_v, problem.softcap, problem.sinks, problem.lse
    )
    own = f"the CPU backend takes every problem, and blocks of {CPU_B_C} keys suit its matrix products"
    if against:
        return Choice(kernel_for(config, problem), f"{own}; PyTorch's own attention is faster, but {against}")
    reason = (
        f"PyTorch's own attention on the CPU computes the same, faster; where a score is not finite, {own}"
    )
    return Choice(kernel_for(config, problem), reason, fused=True)


def _check_able(problem: AttentionProblem, config: ForwardConfig, reason: str | None) -> None:
    if reason:
        raise InfeasibleConfigError(
            f"config {config.short_form()} cannot compute {problem.label()}: {reason}"
        )


@named_keywords
def explain_choice(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = UNLIMITED,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    config: ForwardConfig | None = None,
    backend: str | None = None,
    facts: DeviceFacts | None = None,
) -> Choice:
    """What ``attention`` would run with these arguments, why, and why not the others. Runs nothing.

    Args:
        facts: choose for this GPU, which need not be there, e.g. ``device_facts("H100")``, by the same tuning
            results as there; the tensors may be meta tensors then. None: for the device of the tensors.
        q, k, v and the others: as in ``attention``. The factor of the scores has no influence.

    Raises:
        as ``attention``.
    """
    options = Options(causal, softmax_scale, window, softcap, sinks, return_lse, out, config, backend)
    options = options.checked(q)
    if not (facts is None or isinstance(facts, DeviceFacts)):
        raise TypeError(f"facts is {facts!r}; it must be DeviceFacts, e.g. device_facts('H100'), or None")
    device_types = DEVICE_TYPES if facts is None else (*DEVICE_TYPES, "meta")
    checks.check_inputs(q, k, v, sinks, LAYOUT, device_types=device_types)
    checked_scale(softmax_scale, q.shape[3])
    if out is not None:
        check_output_kind("out", out, (*q.shape[:3], v.shape[3]), q.dtype, q.device)
    problem = problem_of(q, k, v, sinks, options.causal, options.window, options.softcap, options.return_lse)
    if facts is not None:
        if config is not None:
            return select(problem, facts, candidates=[config])
        return select(problem, facts, _tuning_results(environment.tuning_db(), environment.cache_dir()))
    return _choice(problem, q.device, config, explained=True)


def _device(device: torch.device | str) -> torch.device:
    if isinstance(device, str | torch.device):
        with contextlib.suppress(RuntimeError):  # a name that torch does not know
            known = torch.device(device)
            if known.type in DEVICE_TYPES:
                return known
    raise ValueError(f"device is {given(device)}; it must be 'cuda', 'cuda:N' or 'cpu'")


@named_keywords
def prepare(problems: Iterable[AttentionProblem], device: torch.device | str = "cuda") -> list[Choice]:
    """Builds and loads what a list of problems needs, so that no later call compiles anything.

    Args:
        problems: the problems.
        device: a CUDA device that is there; on the CPU there is nothing to build.

    Returns:
        The choice for each problem, as ``attention`` makes it from now on.

    Raises:
        TypeError, ValueError: one is no AttentionProblem, or one that no tensors have.
        NoKernelError: no kernel computes one of the problems.
        KernelCompileError, CompilerNotFoundError: building failed.
    """
    if isinstance(problems, AttentionProblem):
        raise TypeError("problems is one AttentionProblem; it must be several: pass [problem]")
    if not isinstance(problems, Iterable) or isinstance(problems, Tensor):
        raise TypeError(f"problems is {given(problems)}; it must be a list of AttentionProblem")
    problems, device = list(problems), _device(device)
    for problem in problems:
        checks.check_problem(problem)
    problems = [problem.without_idle_limits() for problem in problems]  # as calls ask for them
    if device.type == "cuda":
        cuda = backend("cuda")
        facts = cuda.device_facts_of(device)
        results = _tuning_results(environment.tuning_db(), environment.cache_dir())
        kernels = dict.fromkeys(
            select(problem, facts, results, explained=False).kernel for problem in problems
        )
        missing = [kernel for kernel in kernels if cuda.load_kernel(kernel, facts.target) is None]
        if missing:
            build_kernels(missing, [facts.target])
        for kernel in kernels:
            cuda.get_kernel(kernel, device)
        choose.cache_clear()  # choices that were made while these kernels were not built
        launch_cache.forget()
    return [choose(problem, device, None) for problem in problems]
