"""Forward and backward pass of a call on real tensors, at once: check, problem, choice, run, remember."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attention.backends.sink_gradient import sink_gradient
from flash_attention.backends.without_keys import fill_packed_without_keys, fill_without_keys
from flash_attention.backward_call import BackwardCall
from flash_attention.call import Call, Dropout, Mask, Ran, Scores
from flash_attention.checks import calls as checks
from flash_attention.checks.backward import check_saved
from flash_attention.checks.options import checked_scale
from flash_attention.checks.tensors import check_memory, check_tensors
from flash_attention.devices import backend, backward_backend
from flash_attention.layouts import Layout, PackedCached
from flash_attention.mods.tracing import Traced
from flash_attention.options import Options
from flash_attention.run import launch_cache
from flash_attention.run.choices import choose, choose_with_gradients
from flash_attention.run.document_calls import as_packed, gradients_as_packed
from flash_attention.run.documents import contents_of
from flash_attention.run.launch_cache import Key
from flash_attention.run.plain_forms import mask_and_scores
from flash_helpers import generation
from flash_helpers.kernels.problem import BACKWARD, AttentionProblem
from flash_helpers.select.no_kernel import no_kernel


# ---------------------------------------------------------------------- forward
def forward_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    options: Options,
    key: Key | None = None,
    keep_lse: bool = False,
    traced: Traced | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The output of a call, and its LSE where the caller wants it.

    Args:
        key: by which the call is to be remembered (``launch_cache``); None: it is not.
        keep_lse: the LSE is wanted for a backward pass, too. Its strides may be any.
        traced: what the user's functions do (``traced_functions``); None: there are none.
    """
    options = options.checked(q)
    call = _checked(q, k, v, layout, options, keep_lse, traced)
    if no_kernel(call.problem) is not None:
        if options.config is not None:
            choose(call.problem, q.device, options.config)  # which refuses one that cannot compute this
        if keep_lse:
            _check_backward_config(call.problem, q.device, options)
        _fill_without_kernel(call)
    else:
        packed = None if traced is None else as_packed(call, options, with_gradients=keep_lse)
        call, calls, kept = packed or (call, [call], None)
        problem = calls[0].problem  # which is that of the others, too
        chosen_in = generation.number()
        if not (q.is_cuda or options.return_lse):
            # That of PyTorch's own attention is exact enough for gradients alone.
            problem = replace(problem, lse=False) if problem.lse else problem
        if q.is_cuda and keep_lse:  # gradients are wanted, whose kernel is compiled beside this one's
            configs = options.config, options.backward_config
            captured = () if traced is None else enumerate(traced.tensors)
            learnt = tuple(place for place, x in captured if x.requires_grad)
            choice, _ = choose_with_gradients(problem, q.device, *configs, is_deterministic(options), learnt)
        else:
            choice = choose(problem, q.device, options.config)
            if keep_lse:
                _check_backward_config(problem, q.device, options)
        run = backend("cuda" if q.is_cuda else "cpu").run
        *before, ran = [run(each, choice) for each in calls]
        if kept is not None:
            ran = ran._replace(kept=kept)
        if before:
            ran = ran._replace(repeatable=False)  # a remembered call is one launch
        _remember(call, ran, options, key, chosen_in)
    return call.out, call.lse


def _fill_without_kernel(call: Call) -> None:
    """The results of a call that needs no kernel."""
    problem, layout, sinks = call.problem, call.layout, call.scores.sinks
    if not (problem.batch and problem.seq_len_q and problem.n_heads):
        fill_without_keys(call.out, call.lse, None)  # there is no row, or none but behind the last offset
    elif isinstance(layout, PackedCached):
        fill_packed_without_keys(call.out, call.lse, sinks, layout.cu_seqlens_q, layout.seqused_q)
    else:
        fill_without_keys(call.out, call.lse, sinks)


def _check_backward_config(problem: AttentionProblem, device: torch.device, options: Options) -> None:
    """Refuses a kernel of gradients that the caller names and cannot have, before anything runs."""
    if options.backward_config is not None:
        choose(problem.backward(is_deterministic(options)), device, options.backward_config)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    options: Options,
    keep_lse: bool,
    traced: Traced | None,
) -> Call:
    """The call with its results. Whatever can be known is refused before one number of a tensor is read."""
    sinks, out = options.sinks, options.out
    checks.check_inputs(q, k, v, sinks, layout.axes, layout.paged, layout_kv=layout.axes_kv)
    scale = checked_scale(options.softmax_scale, q.shape[-1])
    layout.check(q, k)
    inputs = {"q": q, "k": k, "v": v, "sinks": sinks, **layout.tensors(), **_captured(traced)}
    check_memory(inputs if out is None else {**inputs, "out": out})
    layout.check_values(q, k)
    sizes = q.shape
    shape = (*sizes[:-1], v.shape[-1])
    if out is None:
        out = q.new_empty(shape, dtype=options.out_dtype)
    else:
        given = {name: x for name, x in inputs.items() if x is not None}
        checks.check_out(out, shape, given, options.out_dtype or q.dtype)
    lse = None
    if options.return_lse or keep_lse:
        lse = q.new_empty((*sizes[:-3], sizes[-2], sizes[-3]), dtype=torch.float32)
    mask, scores = _mask_and_scores(options, scale, traced, layout, q, k)
    rest = options.n_sms, dropout_of(options), options.numerics is not None
    return Call(q, k, v, out, lse, mask, scores, layout, *rest)


def _mask_and_scores(
    options: Options, scale: float, traced: Traced | None, layout: Layout, q: Tensor, k: Tensor
) -> tuple[Mask, Scores]:
    mask = Mask.of(options.causal, options.window)
    scores = Scores(scale, options.softcap, options.sinks, traced)
    return mask_and_scores(mask, scores, layout, *layout.sizes(q, k)[1:])


def dropout_of(options: Options) -> Dropout | None:
    """What is dropped of the softmax. Whoever runs a call at once has drawn the seed."""
    if not options.dropout_p:
        return None
    assert options.dropout_seed is not None
    return Dropout(options.dropout_p, options.dropout_seed)


def _captured(traced: Traced | None) -> dict[str, Tensor]:
    """The tensors that the user's functions capture, by names for messages; checked as all inputs are."""
    if traced is None:
        return {}
    names = {
        f"the captured tensor of shape {tuple(x.shape)}, number {i},": x for i, x in enumerate(traced.tensors)
    }
    check_tensors(names)
    return names


def _remember(call: Call, ran: Ran, options: Options, key: Key | None, chosen_in: int) -> None:
    if ran.kernel is None:
        return
    launch_cache.set_last_kernel(ran.kernel)
    if key is not None and ran.launched is not None and ran.repeatable:
        mods = launch_cache.NO_MODS
        if options.has_mods:
            known = launch_cache.mods_of(options.score_mod, options.mask_mod)
            if known is None:
                return
            mods = known
        behind = launch_cache.behind(call.layout.slots(), mods[1])
        given = (call.q, call.k, call.v, options.out, options.sinks, *behind)
        made = (call.out if options.out is None else None, call.lse, ran.workspace)
        held = options.config, options.backward_config
        launch_cache.remember(key, given, held, ran.kernel, ran.launched, made, chosen_in, kept=ran.kept)


# ---------------------------------------------------------------------- backward
class Wanted(NamedTuple):
    """Of which tensors gradients are wanted. ``captured``: places of what ``score_mod`` captures."""

    q: bool
    k: bool
    v: bool
    sinks: bool
    captured: tuple[int, ...] = ()


class Saved(NamedTuple):
    """What a forward pass leaves to the backward pass, beside layout and options."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    traced: Traced | None = None


Gradients = tuple[Tensor | None, ...]  # of q, k, v and the sinks, then of each captured tensor


def backward_pass(
    saved: Saved,
    layout: Layout,
    options: Options,
    wanted: Wanted,
    dout: Tensor | None,
    dlse: Tensor | None,
    key: Key | None = None,
) -> Gradients:
    """The gradients that are wanted of q, k, v, the sinks and captured tensors; the others are None.

    Args:
        saved: the tensors of the forward pass.
        layout: that of the forward pass.
        options: those of the forward pass.
        wanted: which gradients.
        dout: gradient of the output, any strides; None: the loss does not use it.
        dlse: gradient of the LSE; None: likewise.
        key: by which the pass is to be remembered (``launch_cache``); None: it is not, as none is that
            gathers gradients of captured tensors, for which it makes more tensors.
    """
    q, k, v, sinks, out, lse, traced = saved
    likes = out if dout is None else dout
    check_saved(q, k, v, sinks, out, lse, likes)
    captured = () if traced is None else traced.tensors
    behind = launch_cache.behind(layout.slots(), (*contents_of(traced), *captured))
    given = (q, k, v, out, lse, dout, dlse, *behind)
    dq = room_for(q) if wanted.q else None
    dk = room_for(k) if wanted.k else None
    dv = room_for(v) if wanted.v else None
    dsinks = room_for(sinks) if wanted.sinks and sinks is not None else None
    dcaptured = {place: captured[place].new_empty(captured[place].shape) for place in wanted.captured}
    to_compute = (dq, dk, dv, dsinks)
    made = (*to_compute, *(dcaptured.get(place) for place in range(len(captured))))
    if dout is None:  # the LSE does not depend on v
        dout, key = torch.zeros_like(out), None
        if dv is not None:
            dv.zero_()
            to_compute = (dq, dk, None, dsinks)
    if out.dtype is not q.dtype:  # an output in float32; products take the type of the inputs
        out = out.to(q.dtype)
    if dout.dtype is not q.dtype:
        dout = dout.to(q.dtype)
    if dout.is_neg():
        dout = dout.resolve_neg()
    if dlse is not None and (dlse.dtype is not torch.float32 or dlse.is_neg()):
        dlse = dlse.resolve_neg().float()
    if not dcaptured and all(grad is None for grad in to_compute):
        return made
    scale = checked_scale(options.softmax_scale, q.shape[-1])
    mask, scores = _mask_and_scores(options._replace(sinks=sinks), scale, traced, layout, q, k)
    call = BackwardCall(
        q, k, v, out, lse, dout, dlse, *to_compute, mask, scores, layout, is_deterministic(options),
        dcaptured, dropout_of(options),
    )  # fmt: skip
    if no_kernel(call.problem) is not None:
        _fill_without_keys(to_compute, sinks, lse, dlse)
        for gradient in dcaptured.values():
            gradient.zero_()
        return made
    packed = None if traced is None else gradients_as_packed(call, options)
    calls, kept = packed or ([call], None)
    chosen_in = generation.number()
    choice = choose(calls[0].problem, q.device, options.backward_config)
    run = backend(backward_backend(q.device.type)).run_backward
    *before, launched = [run(each, choice) for each in calls]
    if key is not None and launched is not None and not before:  # a remembered call is one launch
        fresh = (dq, dk, dv, launched.workspace)
        held = options.config, options.backward_config
        launch_cache.remember(key, given, held, choice.kernel, launched, fresh, chosen_in, BACKWARD, kept)
    return made


def is_deterministic(options: Options) -> bool:
    """Whether gradients have to be the same bits in every run: by the call, or by PyTorch's own switch."""
    return options.deterministic or torch.are_deterministic_algorithms_enabled()


def room_for(x: Tensor) -> Tensor:
    """Room for the gradient of x, in its layout where rows are rows there: who made x gets it as it is."""
    if x.stride(-1) == 1 or not x.numel():
        return torch.empty_like(x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fill_without_keys(gradients: Gradients, sinks: Tensor | None, lse: Tensor, dlse: Tensor | None) -> None:
    """The gradients where no query has a key. There an LSE is the sink of its head."""
    dq, dk, dv, dsinks = gradients
    for grad in (dq, dk, dv):
        if grad is not None:
            grad.zero_()
    if dsinks is not None and sinks is not None:
        delta = torch.zeros_like(lse) if dlse is None else -dlse
        dsinks.copy_(sink_gradient(sinks, lse, delta))
