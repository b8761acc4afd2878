"""Context-parallel attention: each rank holds some rows of a sequence, and gets their attention over all."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Never

from flash_attention.call import Mask
from flash_attention.checks import calls as checks
from flash_attention.checks.keywords import parameters, unknown_keyword
from flash_attention.checks.options import (
    checked_flag,
    checked_scale,
    checked_softcap,
    checked_window,
    given,
)
from flash_attention.checks.tensors import no_derivative
from flash_attention.distributed import agreement
from flash_attention.distributed.cost import MethodChoice, Rates, Sizes
from flash_attention.distributed.engine import Plan
from flash_attention.distributed.function import ContextParallel
from flash_attention.distributed.functions import Function, Functions, check_function
from flash_attention.distributed.groups import Group, as_dtensor, group_of, local_sinks, spread_of
from flash_attention.distributed.layout import Layout
from flash_attention.distributed.layout_checks import check_count
from flash_attention.distributed.pairs import Arithmetic
from flash_attention.distributed.schedule import METHODS, Heads, Method, Schedule
from flash_attention.distributed.transport import Transport, meet
from flash_attention.layouts import BATCHES
from flash_attention.torch_private import is_transformed
from flash_helpers.kernels.problem import UNLIMITED, Window

RESERVED_SMS = 8  # left to messages while tiles are computed


@torch.compiler.disable
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout | None = None,
    group: Group | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    window: Window = UNLIMITED,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    score_mod: Function | None = None,
    mask_mod: Function | None = None,
    return_lse: bool = False,
    method: Method | Literal["auto"] = "auto",
    deterministic: bool = True,
    validate: bool = False,
    timeout: float = 60.0,
    reserved_sms: int = RESERVED_SMS,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence whose rows are spread over the ranks of a group, with gradients.

    All ranks of the group make the call together. Masks hold in positions of the whole sequence, and within
    its documents. Partial results are float32 and merged in a fixed order; the result is rounded once.

    Args:
        q: this rank's rows, (batch, rows, n_heads, d_head), float16 or bfloat16; or a DTensor that is
            ``Shard(1)`` on one dimension of its mesh.
        k: (batch, rows, n_heads_kv, d_head), the same rows.
        v: (batch, rows, n_heads_kv, d_head_v), the same rows.
        layout: which rank holds which rows; None: for DTensors that of ``Shard``.
        group: a ProcessGroup, or one dimension of a DeviceMesh; None: that of the DTensors, else the default.
        causal: a row sees the positions up to its own.
        softmax_scale: factor of the scores; None: d_head ** -0.5.
        window: (left, right), of either sign: a row at position p sees p - left to p + right; None: no limit.
        softcap: logits become softcap * tanh(logit / softcap); 0.0: they stay.
        sinks: (n_heads,), equal on all ranks: one more logit a head without a value, counted once. Its
            gradient is this rank's share: their sum over the group is the whole.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)``, as in ``flash_attention.attention``; places are
            positions of the sequence, of documents too. What it captures has to be equal on all ranks, whole,
            and gets no gradient.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``, likewise: whether a query sees a key, beside ``causal``,
            ``window`` and documents. Keys that it alone hides travel.
        return_lse: also return the natural logarithm of each row's softmax denominator.
        method: ``all_gather``, ``ring``, ``ulysses``, or ``auto``: the quickest, as
            ``explain_method`` predicts.
        deterministic: gradients of equal calls on as many ranks have equal bits. False: quicker kernels may
            compute them, as those of ``flash_attention.attention`` are by default.
        validate: on GPUs compare in every call what the ranks were asked for, not only in the first of its
            kind. On the CPU every call is compared. On both also the values of sinks and of what functions
            capture, which are read for it.
        timeout: seconds within which the other ranks have to make the call. With gloo also for each message;
            NCCL takes that of the process group.
        reserved_sms: streaming multiprocessors that kernels of the forward pass leave to messages which begin
            with them, as those of a ring do; kernels of the Hopper family do, the others use all.

    Returns:
        out, this rank's rows, like q with the head size of v; with ``return_lse`` also lse (batch, n_heads,
        rows), float32. DTensors where q is one.

    Raises:
        TypeError, ValueError, NotImplementedError: a bad argument; the message says what is allowed.
        RanksDisagreeError: the ranks were asked for different things, or one of them refused its arguments.
        PeerLostError: a rank has ended, or did not answer in time.
    """
    processes, limit = group_of((q, k, v), group), agreement.TIMEOUT
    try:
        if unknown:
            raise unknown_keyword("attention", unknown, parameters(attention))
        limit = agreement.checked_timeout(timeout)
        spread = spread_of(q, k, v)
        assert processes is not None  # DTensors without a group are refused
        if spread is not None:
            if processes is not spread.group:
                raise ValueError("group is not the one that splits the DTensors' sequence: leave it out")
            layout = spread.layout() if layout is None else layout
            _check_layout(layout, processes)
            spread.check(layout)
        sinks = local_sinks(sinks, spread)
        for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
            check_function(name, function)
        if spread is not None and not (score_mod is mask_mod is None):
            spread.check_functions()
        local = [_autocast(x if spread is None else x.to_local()) for x in (q, k, v)]  # type: ignore[attr-defined]
        layout = _check_layout(layout, processes)
        choice, arithmetic, entries = _checked(
            (*local, sinks), layout, dist.get_rank(processes),
            (causal, softmax_scale, window, softcap, return_lse, method, deterministic, reserved_sms),
            (score_mod, mask_mod),
        )  # fmt: skip
        validate = checked_flag("validate", validate)
        entries["validate"] = str(validate)
        if validate:
            recorded = arithmetic.functions
            captured = () if recorded is None else recorded.plain.tensors
            entries["the values of sinks"] = agreement.of_values(() if sinks is None else (sinks,))
            entries["the values of captured tensors"] = agreement.of_values(captured)
    except Exception as error:
        agreement.refuse(processes, error, limit)
        raise
    device = local[0].device
    agreement.agree(processes, entries, limit, always=validate or device.type == "cpu")
    few = arithmetic
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        few = replace(arithmetic, n_sms=max(1, sms - reserved_sms))
    meet(processes, device)
    transport = Transport(processes, limit, device)
    plan = Plan(choice.schedule, transport, few, arithmetic, bool(return_lse))
    out, lse = ContextParallel.apply(plan, *local, sinks)  # type: ignore[no-untyped-call]
    if spread is not None:
        whole = (*q.shape[:3], v.shape[3])
        out = as_dtensor(out, spread, whole, (0, 1, 2))
        lse = as_dtensor(lse, spread, (whole[0], whole[2], whole[1]), (0, 2, 1))
    return (out, lse) if return_lse else out


def explain_method(
    *,
    layout: Layout,
    n_heads: int,
    n_heads_kv: int,
    d_head: int,
    d_head_v: int | None = None,
    batch: int = 1,
    causal: bool = False,
    window: Window = UNLIMITED,
    rates: Rates | None = None,
) -> MethodChoice:
    """Which method ``attention`` takes with ``method="auto"``, and what each would cost. Asks no other rank.

    The rule: of each method the time of a forward and a backward pass is predicted from the bytes that its
    ranks send and the FLOP that they compute (``Rates``); the least is taken, in the order ``all_gather``,
    ``ring``, ``ulysses``, of which a later one must be quicker by 2 %.

    Args:
        layout: which rank holds which rows.
        n_heads, n_heads_kv, d_head, d_head_v, batch: as in the tensors; d_head_v is d_head where it is None.
        causal, window: as in ``attention``.
        rates: what the prediction rests on; None: those that ``attention`` takes.

    Returns:
        the choice; ``str()`` of it is the reason with a table of bytes, FLOP and times of all methods.
    """
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {given(layout)}; it must be a Layout, e.g. Layout.zigzag(total, world)")
    d_head_v = d_head if d_head_v is None else d_head_v
    counts = {"n_heads": n_heads, "n_heads_kv": n_heads_kv, "d_head": d_head, "d_head_v": d_head_v}
    for name, count in {**counts, "batch": batch}.items():
        check_count(name, count, 0)
    if rates is not None and not isinstance(rates, Rates):
        raise TypeError(f"rates is {given(rates)}; it must be Rates, or None")
    checks.check_head_sizes(d_head, d_head_v)
    checks.check_heads(n_heads, n_heads_kv)
    mask = Mask.of(checked_flag("causal", causal), checked_window(window))
    heads, sizes = Heads(n_heads, n_heads_kv), Sizes(batch, d_head, d_head_v)
    return _choice(layout, mask, heads, sizes, None, rates)


@lru_cache(maxsize=256)
def _choice(
    layout: Layout,
    mask: Mask,
    heads: Heads,
    sizes: Sizes,
    method: Method | None,
    rates: Rates | None = None,
    positions: bool = False,
) -> MethodChoice:
    schedules = tuple(Schedule(name, layout, mask, heads, positions) for name in METHODS)
    return MethodChoice(schedules, sizes, rates or Rates(), method)


def _check_layout(layout: Layout | None, group: dist.ProcessGroup) -> Layout:
    if not isinstance(layout, Layout):
        raise TypeError(
            f"layout is {given(layout)}; it must be a Layout, e.g. Layout.zigzag(total, world): plain "
            "tensors do not say which positions they hold"
        )
    world = dist.get_world_size(group)
    if layout.world != world:
        raise ValueError(f"layout has {layout.world} ranks and the group {world}; they must be equal")
    return layout


def _autocast(x: Tensor) -> Tensor:
    """As autocast converts the inputs of ``flash_attention.attention``."""
    if isinstance(x, Tensor) and x.is_floating_point() and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def _checked(
    tensors: tuple[Any, ...],
    layout: Layout,
    rank: int,
    options: tuple[Any, ...],
    functions: tuple[Function | None, Function | None],
) -> tuple[MethodChoice, Arithmetic, dict[str, str]]:
    """The choice of a method, and what all ranks have to agree on."""
    causal, softmax_scale, window, softcap, return_lse, method, deterministic, reserved_sms = options
    q, k, v, sinks = tensors
    one_q, one_k, one_v, one_sinks = (x.detach() if isinstance(x, Tensor) else x for x in tensors)
    checks.check_inputs(one_q, one_k, one_v, one_sinks, BATCHES, device_types=("cuda", "cpu"))
    rows = layout.lengths[rank]
    for name, x in (("q", q), ("k", k), ("v", v)):
        if is_transformed(x):
            raise no_derivative(f"{name} is one of the tensors of torch.func", "call torch.autograd.grad")
        if x.shape[1] != rows:
            raise ValueError(
                f"{name} has {x.shape[1]} rows; rank {rank} of this layout ({layout.name}, {layout.total} "
                f"rows on {layout.world} ranks) has {rows}: use layout.shard({name}, rank)"
            )
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method is {given(method)}; it must be one of auto, {', '.join(METHODS)}")
    if type(reserved_sms) is not int or reserved_sms < 0:
        raise ValueError(f"reserved_sms is {given(reserved_sms)}; it must be an int, at least 0")
    mask = Mask.of(checked_flag("causal", causal), checked_window(window))
    scale, cap = checked_scale(softmax_scale, q.shape[3]), checked_softcap(softcap)
    deterministic = checked_flag("deterministic", deterministic)
    return_lse = checked_flag("return_lse", return_lse)
    heads = Heads(q.shape[2], k.shape[2])
    sizes = Sizes(q.shape[0], q.shape[3], v.shape[3])
    recorded = Functions.of(*functions, one_q)
    choice = _choice(
        layout, mask, heads, sizes, None if method == "auto" else method, positions=recorded is not None
    )
    wants_gradients = _wants_gradients(q, k, v, sinks)
    # Now: other ranks have to hear of what it refuses.
    choice.schedule.forward(rank)
    if wants_gradients:
        choice.schedule.backward(rank)
    entries = {
        agreement.CALL: "attention",
        "the shape of q": f"{q.shape[0]}, rows, {q.shape[2]}, {q.shape[3]}",
        "the shape of k": f"{k.shape[0]}, rows, {k.shape[2]}, {k.shape[3]}",
        "the head size of v": str(v.shape[3]),
        "the type": str(q.dtype),
        "the device type": q.device.type,
        "layout": agreement.of_layout(layout),
        "causal": str(bool(causal)),
        "window": f"{mask.left}, {mask.right}",
        "softmax_scale": repr(scale),
        "softcap": repr(cap),
        "sinks": "none" if sinks is None else str(sinks.dtype),
        "score_mod and mask_mod": "none" if recorded is None else recorded.described(),
        "return_lse": str(return_lse),
        "method": choice.method,
        "deterministic": str(deterministic),
        "whether gradients are wanted": str(wants_gradients),
    }
    return choice, Arithmetic(scale, cap, deterministic, functions=recorded), entries


def _wants_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
