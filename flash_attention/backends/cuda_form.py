"""Tensors brought into the form that a kernel takes: padded, aligned, packed, with a scale of at least 0."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flash_attention.backends.cuda_kernels import device_facts_of
from flash_attention.call import Call
from flash_attention.checks.memory import misalignment
from flash_attention.layouts import Cached, Packed, PackedCached
from flash_attention.mods.arguments import mod_arguments
from flash_helpers.kernels.arguments import ModArguments
from flash_helpers.kernels.launch_features import UNBOUNDED, Features
from flash_helpers.select.candidates import numeric_class_of
from flash_helpers.select.chosen import Choice
from flash_helpers.select.part_plan import part_plan

SMALLEST_CAP, LARGEST_CAP = 2.0**-126, 2.0**100  # as kernels with a soft cap of their own bound it


def window_side(limit: int | None) -> int:
    """A side of the window as kernels take it, in 32 bits; no sequence under a window is longer than that."""
    return UNBOUNDED if limit is None else max(-UNBOUNDED - 1, min(limit, UNBOUNDED))


def cap_of_mod(softcap: float) -> tuple[float, ...]:
    """The soft cap as a number of a mod, the last one; none without it."""
    return (min(max(softcap, SMALLEST_CAP), LARGEST_CAP),) if softcap else ()


class Prepared(NamedTuple):
    """What ``cuda.forward`` takes beside the kernel, and what has to live as long as the launch.

    Attributes:
        q, k, v: (batch, seq, heads, d), as ``cuda.forward`` wants them.
        target: o of ``cuda.forward``, a view of ``o``.
        lse: (batch, n_heads, seq_len_q), or None.
        scale: factor of the scores, at least 0.
        features: what plain attention does not need, or None.
        o: the rows of the call's output; another tensor than it if they are longer.
        workspace: float32 memory for the parts of split keys, or None.
        kept: tensors of which the features have addresses.
        mod: what the kernel's mod captured, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    target: Tensor
    lse: Tensor | None
    scale: float
    features: Features | None
    o: Tensor
    workspace: Tensor | None
    kept: tuple[Tensor | None, ...]
    mod: ModArguments | None = None


def prepared(call: Call, choice: Choice) -> Prepared:
    """The tensors of a call in the form that the chosen kernel takes."""
    problem, traits, layout = call.problem, choice.kernel.traits, call.layout
    q, k, v, out, lse = call.q, call.k, call.v, call.out, call.lse
    scale, softcap, sinks, traced = call.scores
    packed = layout if isinstance(layout, Packed | PackedCached) else None
    cache = layout if isinstance(layout, Cached | PackedCached) else None
    keys_packed = packed is not None and packed.cu_seqlens_k is not None
    d_head, d_head_v = choice.head_sizes
    if traits.padded_head:
        d_head, d_head_v = problem.d_head, problem.d_head_v
    if choice.problem is not None:
        problem = choice.problem
        fewer_keys = problem.seq_len_k != call.problem.seq_len_k
        if (
            fewer_keys and cache is None and packed is None
        ):  # the keys from the first that a query sees to the last
            end = call.problem.seq_len_k + min(call.problem.right or 0, 0)
            k, v = (x[:, end - problem.seq_len_k : end] for x in (k, v))
    if scale < 0:
        q, scale = -q, -scale
    q, k, v = _fitted(q, d_head), _fitted(k, d_head), _fitted(v, d_head_v)
    o = out if out.shape[-1] == d_head_v else out.new_empty((*out.shape[:-1], d_head_v))
    target, features, workspace = o, None, None
    table = None if cache is None or cache.block_table is None else cache.block_table.contiguous()
    if table is not None:
        most_keys = table.shape[1] * k.shape[1]
    else:  # of packed keys any sequence may have all, whatever max_seqlen_k says
        most_keys = k.shape[0] if keys_packed else k.shape[1]
    kept_sums = _kept_sums(choice, most_keys, q.device)
    mod = None
    if problem.has_mod:  # a soft cap is a part of the kernel's mod, and a number of 32 bits
        mod = mod_arguments(traced, *cap_of_mod(softcap), dropout=call.dropout)
    plain = choice.is_plain and mod is None and d_head == d_head_v and problem.n_sms is None
    if not plain or kept_sums:
        sinks = None if sinks is None else sinks.float().contiguous()
        n_rows = choice.n_splits * problem.batch * problem.n_heads * problem.seq_len_q
        # What parts of the keys leave of a row: its output and its LSE, of chunks sum and exponent.
        of_row = d_head_v + (2 if numeric_class_of(choice.kernel.config).chunk_tiles else 1)
        floats = n_rows * of_row if traits.split else 0
        planned: dict[str, int] = {}
        if isinstance(layout, PackedCached):
            plan = part_plan(problem, choice.kernel, choice.slots, q.shape[0], layout.n_splits)
            n_rows = plan.rows
            floats = n_rows * of_row
            planned = {
                "seqused_q": 0 if layout.seqused_q is None else layout.seqused_q.data_ptr(),
                "plan_slots": plan.slots,
                "plan_shortest": plan.shortest,
                "plan_longest": plan.longest,
                "plan_few_queries": plan.few_queries,
                "plan_fixed": plan.fixed,
                "partial_rows": plan.rows,
            }
        if floats or kept_sums:
            # It is given out again only after the stream has used it.
            workspace = q.new_empty(kept_sums + floats, dtype=torch.float32)
        features = Features(
            d_head_v=d_head_v,
            window_left=window_side(problem.left),
            window_right=window_side(problem.right),
            softcap=softcap,
            sinks=address(sinks),
            cu_seqlens_q=0 if packed is None else packed.cu_seqlens_q.data_ptr(),
            cu_seqlens_k=0 if packed is None else address(packed.cu_seqlens_k),
            seqused_k=0 if cache is None else address(cache.seqused_k),
            total_q=0 if packed is None else q.shape[0],
            total_k=k.shape[0] if keys_packed else 0,
            n_splits=choice.n_splits,
            partial_o=address(workspace, kept_sums) if floats else 0,
            partial_lse=address(workspace, kept_sums + n_rows * d_head_v) if floats else 0,
            kept_sums=address(workspace) if kept_sums else 0,
            block_table=address(table),
            max_pages=0 if table is None else table.shape[1],
            page_size=0 if table is None else k.shape[1],
            o_float32=problem.out_float32,
            n_sms=problem.n_sms or 0,
            **planned,
        )
    if packed is not None:
        q, target = (_as_sequences(x, problem.batch, problem.seq_len_q) for x in (q, o))
        if keys_packed:
            k, v = (_as_sequences(x, problem.batch, x.shape[0]) for x in (k, v))
    elif problem.n_heads != q.shape[2]:
        q, target = _groups_as_rows(q, problem.n_heads), _groups_as_rows(o, problem.n_heads)
        lse = None if lse is None else lse.view(problem.batch, problem.n_heads, problem.seq_len_q)
    return Prepared(q, k, v, target, lse, scale, features, o, workspace, (sinks, table), mod)


def address(x: Tensor | None, element: int = 0) -> int:
    """Where a tensor's element lies, counted from its first, for a kernel; 0: there is no tensor."""
    return 0 if x is None else x.data_ptr() + element * x.element_size()


def _kept_sums(choice: Choice, most_keys: int, device: torch.device) -> int:
    """Floats in which blocks keep what chunks of keys have left; 0: no block takes several of a row.

    Args:
        choice: the kernel, and the parts that keys are cut into.
        most_keys: of a sequence, as the launch is told it; not as the problem says it, which may be less.
        device: the tensors'.
    """
    numeric_class = numeric_class_of(choice.kernel.config)
    chunk_keys = numeric_class.chunk_tiles * numeric_class.key_tile
    if not chunk_keys or most_keys <= chunk_keys * choice.n_splits:
        return 0
    floats: int = choice.kernel.config.kept_sums(device_facts_of(device).sm_count)
    return floats


def _groups_as_rows(x: Tensor, n_heads_kv: int) -> Tensor:
    """One query (batch, 1, heads, d) as (batch, group, kv heads, d), by strides alone."""
    return x[:, 0].unflatten(1, (n_heads_kv, -1)).transpose(1, 2)


def _as_sequences(x: Tensor, batch: int, longest: int) -> Tensor:
    """Packed rows in the shape that a launch reads, (batch, longest, heads, d).

    The offsets say where each sequence begins, so that the stride between sequences does not count. Grid and
    workspaces need the most queries of a sequence; of keys any bound will do.
    """
    return x[None, :longest].expand(batch, -1, -1, -1)


def _fitted(x: Tensor, d_head: int) -> Tensor:
    if x.shape[-1] != d_head:
        return pad(x, (0, d_head - x.shape[-1]))
    if x.stride(-1) != 1 or misalignment(x):
        return x.clone(memory_format=torch.contiguous_format)
    return x
