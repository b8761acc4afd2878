"""What a kernel executes for a problem, and the least that any kernel has to."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.flops import visible_pairs
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.kernels.problem import AttentionProblem


@dataclass(frozen=True)
class Work:
    """What a kernel executes, and the least it would have to. Packed sequences count as full.

    Attributes:
        flop: of the visible pairs, by the formula of ``flops``.
        executed_flop: of all tiles the kernel visits; masked parts of visited tiles are computed too.
        exponentials: executed pairs, one exp2 each.
        min_bytes: Q, K, V read once, O written once; of gradients these and theirs, and what sums take.
        l2_bytes: what the thread blocks read and write together: each reads its keys anew, from L2 at best.
        added_bytes: of them float32 sums of gradients that are added to in global memory.
        around_bytes: what the kernels before and after the main one read and write.
        blocks: thread blocks of query rows, all heads and batch items; or, of gradients, of keys.
        steps: pairs of a Q tile and a K/V block that all of them visit together.
        longest: those that the busiest one visits.
    """

    flop: int
    executed_flop: int
    exponentials: int
    min_bytes: int
    l2_bytes: int
    blocks: int
    steps: int
    longest: int
    added_bytes: int = 0
    around_bytes: int = 0


def work(config: KernelConfig, problem: AttentionProblem) -> Work:
    """The work of one problem by one configuration, whose head sizes count: tensors may be narrower."""
    B_r, B_c = config.B_r, config.B_c
    columns = config.d_head + config.d_head_v  # of Q and O together, and of K and V
    heads, heads_kv = problem.batch * problem.n_heads, problem.batch * problem.n_heads_kv
    seq_q, seq_k, limits = problem.seq_len_q, problem.seq_len_k, (problem.left, problem.right)
    steps = heads * block_steps(seq_q, seq_k, B_r, B_c, *limits)
    pairs = steps * B_r * B_c
    itemsize = problem.dtype.itemsize
    wanted = problem.d_head + problem.d_head_v
    model = direction_of(config).model
    tensor_bytes = wanted * itemsize * (heads * seq_q + heads_kv * min(seq_k, problem.keys_of_block(seq_q)))
    if model is not None and model.owns_keys:
        per_pair, sums = model.flop_of_pair(config), model.bytes_of_sums(config)
        flop = 2 * heads * visible_pairs(seq_q, seq_k, window=limits)
        tiles = -(-seq_k // B_c)
        together = tiles if model.takes_whole_heads(config) else 1
        added = steps * model.added_bytes(config)
        return Work(
            flop=flop * (3 * problem.d_head + 2 * problem.d_head_v),
            executed_flop=pairs * per_pair,
            exponentials=pairs,
            min_bytes=2 * tensor_bytes + heads * seq_q * sums,
            l2_bytes=columns * itemsize * (heads_kv * seq_k + steps * B_r) + added,
            blocks=heads_kv * tiles // together,
            steps=steps,
            longest=-(-seq_q // B_r) * together * (heads // heads_kv if heads_kv else 0),
            added_bytes=added,
            around_bytes=heads * seq_q * model.bytes_around(config),
        )
    return Work(
        flop=2 * heads * visible_pairs(seq_q, seq_k, window=limits) * wanted,
        executed_flop=2 * pairs * columns,
        exponentials=pairs,
        min_bytes=tensor_bytes,
        l2_bytes=columns * itemsize * (heads * seq_q + steps * B_c),
        blocks=heads * -(-seq_q // B_r),
        steps=steps,
        longest=-(-problem.keys_of_block(B_r) // B_c),
    )


def block_steps(
    seq_len_q: int, seq_len_k: int, B_r: int, B_c: int, left: int | None = None, right: int | None = None
) -> int:
    """The K/V blocks that are visited, summed over the Q blocks of one head.

    The last query stands at the last key's place (bottom-right alignment). A Q block visits the K/V blocks
    from that of its first query's first visible key to that of its last query's last one.

    Args:
        seq_len_q, seq_len_k: queries and keys.
        B_r, B_c: rows of a Q block, of a K/V block.
        left, right: limits of either sign; see ``AttentionProblem``.
    """
    if not seq_len_q or not seq_len_k or (left is not None and right is not None and left + right < 0):
        return 0
    before, offset = -(-seq_len_q // B_r) - 1, seq_len_k - seq_len_q  # blocks before the last one
    starts = last_start = 0
    if right is None:
        last_end = -(-seq_len_k // B_c)
        ends = before * last_end
    else:  # the last block, whole or not, ends with the last query's last key
        last_end = _clamped_floors(1, seq_len_k + right, B_r, seq_len_k, B_c - 1, B_c)
        ends = _clamped_floors(before, B_r + offset + right, B_r, seq_len_k, B_c - 1, B_c)
    if left is not None:
        last_start = _clamped_floors(1, before * B_r + offset - left, B_r, seq_len_k, 0, B_c)
        starts = _clamped_floors(before, offset - left, B_r, seq_len_k, 0, B_c)
    return ends - starts + last_end - last_start


def _clamped_floors(count: int, first: int, step: int, limit: int, add: int, divisor: int) -> int:
    """The sum of (x + add) // divisor over ``count`` values first, first + step, … kept in 0 … limit."""
    below = min(count, max(0, -(first // step)))  # x < 0, but for one that may be 0
    within = min(count, max(below, -(-(limit - first) // step))) - below
    above = count - below - within
    return (
        below * (add // divisor)
        + _floor_sum(within, step, first + below * step + add, divisor)
        + above * ((limit + add) // divisor)
    )


def _floor_sum(count: int, step: int, start: int, divisor: int) -> int:
    """The sum of (start + i * step) // divisor over i < count, in steps as of Euclid's algorithm."""
    if count <= 0:
        return 0
    total = count * (count - 1) // 2 * (step // divisor) + count * (start // divisor)
    step, start = step % divisor, start % divisor
    end = start + count * step
    if end >= divisor:
        total += _floor_sum(end // divisor, divisor, end % divisor, step)
    return total
