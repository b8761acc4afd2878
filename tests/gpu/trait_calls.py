"""One call of a kernel with traits: guarded tensors, the launch, and what should come out of it.

Every tensor lies within NaN and every output is poisoned before the launch: what is read beyond a tensor
shows, and so does what is written there or left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import unwritten
from torch import Tensor

from flash_attention.backends import cuda
from flash_attention.backends.cuda import UNBOUNDED, Features
from flash_helpers.kernel_configs import DType, ForwardKernel
from flash_helpers.select.splits import n_splits
from flash_helpers.test.utils import error_stats, reference

GUARD = 16  # rows and columns around every tensor
SENTINEL = 777.0  # around outputs
TOLERANCE = {DType.FP16: 2e-3, DType.BF16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    """What to compute.

    Attributes:
        q, k: queries and keys of every sequence; a tuple: of each, one sequence packed behind the other.
        batch: sequences, where no tuple says it.
        heads: query heads and kv heads.
        used: keys of each sequence that exist; the others are NaN.
        page: with a paged kernel, rows of a page; the last page of a sequence may not be full.
        window: (left, right); None: unbounded.
        softcap: 0: none.
        parts: into which the keys are cut; 0: as many as ``n_splits`` says for an H100.
        d, d_v: columns of q and k, of v and o; 0: the kernel's, and d.
        spread: standard deviation of q.
        jump: scores grow by hundreds of powers of two from the last 256 keys to those before.
    """

    q: int | tuple[int, ...]
    k: int | tuple[int, ...]
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    used: tuple[int, ...] | None = None
    page: int = 16
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    parts: int = 0
    d: int = 0
    d_v: int = 0
    spread: float = 1.0
    jump: bool = False


def guarded(shape: tuple[int, ...], dtype: torch.dtype, fill: float) -> tuple[Tensor, Tensor]:
    """A buffer full of ``fill``, and (batch, rows, heads, columns) in the middle of it."""
    batch, rows, heads, columns = shape
    buffer = torch.full(
        (batch + 2, rows + 2 * GUARD, heads, columns + 2 * GUARD), fill, dtype=dtype, device="cuda"
    )
    return buffer, buffer[1:-1, GUARD : GUARD + rows, :, GUARD : GUARD + columns]


PADDING = 77  # rows of packed tensors that are of no sequence


class Sequences:
    """Where the rows of each sequence are: packed in one batch entry, or one sequence an entry."""

    def __init__(self, lengths: int | tuple[int, ...], batch: int) -> None:
        """Packed sequences have padding behind the last one."""
        self.packed = isinstance(lengths, tuple)
        self.lengths = lengths if isinstance(lengths, tuple) else (lengths,) * batch
        self.longest = max(self.lengths)
        self.offsets = [sum(self.lengths[:b]) for b in range(len(self.lengths) + 1)]
        total = self.offsets[-1] + PADDING
        self.shape = (1, total) if self.packed else (len(self.lengths), self.longest)

    def rows(self, x: Tensor, b: int) -> Tensor:
        """(1, rows, heads, columns) of sequence b."""
        return x[:, self.offsets[b] : self.offsets[b + 1]] if self.packed else x[b : b + 1]

    def lse(self, lse: Tensor, b: int) -> Tensor:
        """(1, heads, rows) of sequence b."""
        return lse[None, :, self.offsets[b] : self.offsets[b + 1]] if self.packed else lse[b : b + 1]

    def as_batch(self, x: Tensor) -> Tensor:
        """The tensor with the shape (sequences, longest, ...) that a launch takes; not to be looked at."""
        return x[:, : self.longest].expand(len(self.lengths), -1, -1, -1) if self.packed else x


def in_pages(page: int, used: Sequence[int], *caches: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(batch, max_pages) int32, and (pages, page, heads, columns) of each (batch, rows, heads, columns).

    Pages are in random order and lie within NaN. Entries behind a sequence's last row lead to no memory.
    """
    batch, rows = caches[0].shape[:2]
    max_pages = -(-rows // page)
    order = torch.randperm(batch * max_pages, generator=torch.Generator().manual_seed(page))
    table = order.view(batch, max_pages).int().cuda()
    paged = []
    for cache in caches:
        shape = (batch * max_pages, page, *cache.shape[2:])
        _, pages = guarded(shape, cache.dtype, math.nan)
        whole = torch.full((batch, max_pages * page, *shape[2:]), math.nan, dtype=cache.dtype, device="cuda")
        whole[:, :rows] = cache
        pages[table.flatten().long()] = whole.view(shape)
        paged.append(pages)
    for b, n in enumerate(used):
        table[b, -(-n // page) :] = 2**31 - 1
    return table, paged


def differing(x: Tensor, y: Tensor) -> str:
    """Where two tensors differ, how often, and what each has there; empty: nowhere. NaN equals NaN."""
    places = ((x != y) & ~(x.isnan() & y.isnan())).nonzero().tolist()
    if not places:
        return ""
    shown = ", ".join(f"{at}: {x[tuple(at)].item()} and {y[tuple(at)].item()}" for at in places[:4])
    return f"{len(places)} of {x.numel()} elements, {shown}{', ...' if len(places) > 4 else ''}"


class Call:
    """The tensors of a case."""

    def __init__(self, kernel: ForwardKernel, case: Case) -> None:
        self.kernel, self.case = kernel, case
        config, (self.heads, heads_kv) = kernel.config, case.heads
        self.q_seq, self.k_seq = Sequences(case.q, case.batch), Sequences(case.k, case.batch)
        self.n = len(self.q_seq.lengths)
        self.d = case.d or config.d_head
        self.d_v = case.d_v or case.d or getattr(config, "d_head_v", self.d)
        self.used = case.used or self.k_seq.lengths
        generator = torch.Generator("cuda").manual_seed(self.q_seq.offsets[-1] + 7 * self.k_seq.offsets[-1])

        def normal(seq: Sequences, heads: int, columns: int) -> Tensor:
            shape = (*seq.shape, heads, columns)
            _, view = guarded(shape, config.dtype.to_torch_dtype(), math.nan)
            return view.copy_(torch.randn(shape, device="cuda", generator=generator))

        self.q = normal(self.q_seq, self.heads, self.d).mul_(case.spread)
        self.k = normal(self.k_seq, heads_kv, self.d)
        self.v = normal(self.k_seq, heads_kv, self.d_v)
        if case.jump:
            self.q *= 8
            self.k *= 10
            self.k[:, -256:] *= 0.001
        for x in (self.k, self.v):
            if self.k_seq.packed:
                x[:, self.k_seq.offsets[-1] :] = math.nan
            for b, used in enumerate(self.used):
                rows = self.k_seq.rows(x, b)
                rows[:, used:] = math.nan
                rows[:, : self.unseen(b)] = math.nan
        self.sinks = None
        if kernel.traits.sinks:  # from far below the scores to far above them
            self.sinks = torch.linspace(-200, 200, self.heads, device="cuda").roll(1)
            self.sinks[: self.heads // 2] = torch.linspace(-3, 4, self.heads // 2, device="cuda")
        self.parts = 1
        if kernel.traits.split:
            q_blocks = -(-self.q_seq.longest // config.B_r)
            self.parts = case.parts or n_splits(
                self.n * self.heads * q_blocks,
                self.n * self.heads * self.q_seq.longest,
                -(-self.k_seq.longest // config.B_c),
                self.d_v,
                sm_count=132,
                blocks_per_sm=2,
            )

    def launch(self) -> tuple[Tensor, Tensor]:
        """o and lse, shaped as q and as (heads, rows of all) or (batch, heads, rows)."""
        buffer, o = guarded((*self.q.shape[:3], self.d_v), self.q.dtype, SENTINEL)
        o.fill_(math.nan)
        total = self.q.shape[1]
        rows = (self.n, self.heads, self.q_seq.longest)
        lse = torch.full((self.heads, total) if self.q_seq.packed else rows, math.nan, device="cuda")
        partial_o = torch.full((self.parts, *rows, self.d_v), math.nan, device="cuda")
        partial_lse = torch.full((self.parts, *rows), math.nan, device="cuda")
        cu_q, cu_k, used = (
            torch.tensor(x, dtype=torch.int32, device="cuda")
            for x in (self.q_seq.offsets, self.k_seq.offsets, self.used)
        )
        left, right = self.case.window
        features = Features(
            d_head_v=self.d_v,
            window_left=UNBOUNDED if left is None else left,
            window_right=UNBOUNDED if right is None else right,
            softcap=self.case.softcap,
            sinks=0 if self.sinks is None else self.sinks.data_ptr(),
            cu_seqlens_q=cu_q.data_ptr() if self.q_seq.packed else 0,
            cu_seqlens_k=cu_k.data_ptr() if self.k_seq.packed else 0,
            seqused_k=used.data_ptr() if self.case.used else 0,
            total_q=total if self.q_seq.packed else 0,
            total_k=self.k.shape[1] if self.k_seq.packed else 0,
            n_splits=self.parts,
            partial_o=partial_o.data_ptr(),
            partial_lse=partial_lse.data_ptr(),
        )
        q, k, v = self.q_seq.as_batch(self.q), self.k_seq.as_batch(self.k), self.k_seq.as_batch(self.v)
        if self.kernel.traits.paged:
            table, (k, v) = in_pages(self.case.page, self.used, k, v)
            used_in_pages = torch.tensor(self.used, dtype=torch.int32, device="cuda")
            features = features._replace(
                block_table=table.data_ptr(), max_pages=table.shape[1], page_size=self.case.page,
                seqused_k=used_in_pages.data_ptr(),
            )  # fmt: skip
        unwritten.fill_with_nan()
        cuda.forward(self.kernel, q, k, v, o, lse, self.d**-0.5, features)
        torch.cuda.synchronize()
        result = o.clone()
        o.fill_(SENTINEL)
        assert (buffer == SENTINEL).all(), "something beyond the output was written"
        return result, lse

    def unseen(self, b: int) -> int:
        """The first keys of sequence b, before the window of its first query: no query sees them."""
        left = self.case.window[0]
        if not self.kernel.traits.window or left is None:
            return 0
        return max(0, self.used[b] - self.q_seq.lengths[b] - left)

    def sequence(self, b: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of sequence b, without the keys that do not exist."""
        q, k, v = self.q_seq.rows(self.q, b), self.k_seq.rows(self.k, b), self.k_seq.rows(self.v, b)
        k, v = (x[:, : self.used[b]].clone() for x in (k, v))
        for x in (k, v):
            x[:, : self.unseen(b)] = 0.0
        return q, k, v

    def check(self) -> tuple[Tensor, Tensor]:
        """Launches twice and compares each sequence with the reference; returns o and lse.

        An error may be twice that of PyTorch in the same precision, over the whole sequence, and nowhere
        beyond the tolerance of the type.
        """
        o, lse = self.launch()
        again, lse_again = self.launch()
        for name, x, y in (("O", o, again), ("LSE", lse, lse_again)):
            difference = differing(x, y)
            assert not difference, f"{self.case}: two equal calls differ in {name}: {difference}"
        if self.q_seq.packed:
            behind = self.q_seq.offsets[-1]
            assert (o[:, behind:] == 0).all(), f"{self.case}: rows behind the last sequence are not 0"
            assert (lse[:, behind:] == -math.inf).all(), f"{self.case}: ... their LSE is not -inf"
        for b in range(self.n):
            if self.q_seq.lengths[b]:
                self._check_sequence(b, self.q_seq.rows(o, b), self.q_seq.lse(lse, b))
        return o, lse

    def _check_sequence(self, b: int, o: Tensor, lse: Tensor) -> None:
        q, k, v = self.sequence(b)
        out, expected_lse = reference(
            q, k, v, causal=self.kernel.traits.causal, window=self.case.window, softcap=self.case.softcap,
            sinks=self.sinks,
        )  # fmt: skip

        def where(text: str) -> str:
            return f"{self.case}, sequence {b}: {text}"

        tolerance = TOLERANCE[self.kernel.config.dtype]
        torch.testing.assert_close(o.double(), out, atol=tolerance, rtol=tolerance, msg=where)
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6, msg=where)
        allowed = error_stats(self.same_precision(b), out).rel_frobenius
        error = error_stats(o, out).rel_frobenius
        assert error <= 2 * allowed + 1e-6, where(f"error {error}, allowed twice {allowed}")

    def same_precision(self, b: int) -> Tensor:
        """PyTorch's eager attention of sequence b, every step rounded to the tensors' type."""
        q, k, v = self.sequence(b)
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k, v))
        scores = q.transpose(1, 2) @ k.mT * self.d**-0.5  # (1, heads, rows, keys)
        if self.case.softcap:
            scores = self.case.softcap * torch.tanh(scores / self.case.softcap)
        rows, keys = scores.shape[-2:]
        place = torch.arange(rows, device="cuda")[:, None] + keys - rows
        key = torch.arange(keys, device="cuda")
        left, right = self.case.window
        if self.kernel.traits.causal:
            right = min(0, keys if right is None else right)
        hidden = torch.zeros(rows, keys, dtype=torch.bool, device="cuda")
        if left is not None:
            hidden |= key < place - left
        if right is not None:
            hidden |= key > place + right
        scores = scores.masked_fill(hidden, -math.inf)
        if self.sinks is not None:
            sinks = self.sinks.to(scores.dtype)[None, :, None, None].expand(1, -1, rows, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1).nan_to_num()[..., :keys]  # rows without keys are NaN
        return (weights @ v).transpose(1, 2)
