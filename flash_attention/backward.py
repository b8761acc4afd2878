"""The backward pass with a configuration named by the caller: that kernel runs, or an error says why not."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from flash_attention.backward_call import BackwardCall
from flash_attention.call import Mask, Scores, shifted
from flash_attention.checks.backward import check_backward
from flash_attention.checks.configs import check_config
from flash_attention.checks.keywords import named_keywords
from flash_attention.checks.options import checked_scale, checked_softcap
from flash_attention.devices import backend
from flash_attention.run.choices import choose
from flash_attention.torch_private import sleep
from flash_helpers.kernels.kernel import BackwardConfig
from flash_helpers.kernels.problem import BACKWARD, UNLIMITED, Window

HIDE_HOST_CYCLES = 1_000_000  # GPU clock cycles, about 0.5 ms: longer than the host takes to queue all

Gradients = tuple[Tensor, Tensor, Tensor]


@named_keywords
def backward(
    kernel_cfg: BackwardConfig,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = UNLIMITED,
    softcap: float = 0.0,
    diagonal_offset: int = 0,
    dlse: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> Gradients:
    """The gradients of one call of ``attention``, by one kernel.

    Runs on the device of the tensors: a CUDA GPU, on its current stream, or the CPU. Any strides are taken;
    rows that a kernel cannot reach are copied. Sinks act through the LSE, so that their values do not matter
    here; their own gradient is made by differentiating ``attention``.

    Args:
        kernel_cfg: the kernel. It is compiled first if it is not built yet.
        dout: gradient of o, like it.
        q: (batch, seq_len_q, n_heads, d_head), float16 or bfloat16 as the configuration says.
        k: (batch, seq_len_k, n_heads_kv, d_head); n_heads_kv divides n_heads.
        v: (batch, seq_len_k, n_heads_kv, d_head_v).
        o: (batch, seq_len_q, n_heads, d_head_v), what the forward pass returned.
        lse: (batch, n_heads, seq_len_q) float32, what it returned with ``return_lse=True``.
        causal, softmax_scale, window, softcap, diagonal_offset: as in the forward pass.
        dlse: gradient of lse, like it; None: the loss does not use it.
        dq, dk, dv: like q, k and v; written and returned. They must overlap no other tensor. None: new ones.

    Returns:
        dq, dk, dv; contiguous if they are new.

    Raises:
        TypeError, ValueError, NotImplementedError, DeviceNotSupportedError, InfeasibleConfigError: as
            ``forward`` and ``attention`` do.
    """
    causal, window = shifted(causal, window, diagonal_offset)
    call = _checked(
        kernel_cfg, dout, q, k, v, o, lse, causal, softmax_scale, window, softcap, dlse, (dq, dk, dv)
    )
    run = _prepared(kernel_cfg, call)
    run()
    return _gradients(call)


@named_keywords
def backward_timed(
    kernel_cfg: BackwardConfig,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = UNLIMITED,
    softcap: float = 0.0,
    diagonal_offset: int = 0,
    dlse: Tensor | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
) -> tuple[Gradients, float]:
    """``backward`` with the time of all its kernels, measured as ``forward_timed`` measures.

    Returns:
        the gradients as ``backward`` gives them, and the time in milliseconds.

    Raises:
        what ``backward`` raises.
    """
    causal, window = shifted(causal, window, diagonal_offset)
    call = _checked(
        kernel_cfg, dout, q, k, v, o, lse, causal, softmax_scale, window, softcap, dlse, (dq, dk, dv)
    )
    run = _prepared(kernel_cfg, call)
    if not q.is_cuda:
        begin = time.perf_counter()
        run()
        return _gradients(call), 1e3 * (time.perf_counter() - begin)
    with torch.cuda.device(q.device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        sleep(HIDE_HOST_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
    return _gradients(call), start.elapsed_time(end)


def _checked(
    kernel_cfg: BackwardConfig,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    softmax_scale: float | None,
    window: Window,
    softcap: float,
    dlse: Tensor | None,
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> BackwardCall:
    """The call, with room for its gradients."""
    check_config(kernel_cfg, "kernel_cfg", BACKWARD)
    mask = Mask.of(causal, window)
    softcap = checked_softcap(softcap)
    check_backward(dout, q, k, v, o, lse, dlse, dict(zip(("dq", "dk", "dv"), outputs, strict=True)))
    scores = Scores(checked_scale(softmax_scale, q.shape[3]), softcap)
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if given is None else given
        for given, x in zip(outputs, (q, k, v), strict=True)
    )
    return BackwardCall(q, k, v, o, lse, dout, dlse, dq, dk, dv, None, mask, scores)


def _prepared(kernel_cfg: BackwardConfig, call: BackwardCall) -> Callable[[], None]:
    """What computes the call; a kernel is compiled and loaded here."""
    choice = choose(call.problem, call.q.device, kernel_cfg)
    if call.q.is_cuda:
        backend("cuda").get_kernel(choice.kernel, call.q.device)
        return lambda: backend("cuda_backward").run_backward(call, choice)
    cpu = backend("cpu_backward")
    left, right = call.problem.left, call.problem.right
    return lambda: cpu.backward(
        kernel_cfg,
        call.dout,
        call.q,
        call.k,
        call.v,
        call.out,
        call.lse,
        call.dlse,
        call.scores.scale,
        cpu.Gradients(call.dq, call.dk, call.dv),
        left=left,
        right=right,
        softcap=call.scores.softcap,
    )


def _gradients(call: BackwardCall) -> Gradients:
    dq, dk, dv = (x for x in (call.dq, call.dk, call.dv) if x is not None)  # made by _checked
    return dq, dk, dv
