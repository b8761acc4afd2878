"""``Layout``: which rank holds which positions of a sequence, in which order."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from flash_attention.checks.options import given
from flash_attention.distributed.layout_checks import (
    check_count,
    check_each_once,
    check_kinds,
    check_sizes,
    checked_documents,
    checked_numbers,
    short,
)


@dataclass(frozen=True)
class Layout:
    """Which rank holds which positions of a sequence, in which order.

    Make one with ``contiguous``, ``zigzag``, ``striped``, ``windowed``, ``per_document`` or ``explicit``.
    Any length is taken; ranks may hold different numbers of rows, or none.

    Attributes:
        name: the constructor that made it.
        total: rows of the whole sequence.
        ranks: for each rank the ranges of positions that it holds, in the order of its rows.
        documents: 0 and the end of each packed document; a row sees rows of its own document alone. None:
            the sequence is one document.
    """

    name: str
    total: int
    ranks: tuple[tuple[range, ...], ...]
    documents: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_count("total", self.total, 0)
        check_kinds(self.ranks, self.documents)
        object.__setattr__(self, "lengths", tuple(sum(map(len, runs)) for runs in self.ranks))
        check_each_once(self.ranks, self.total)
        ends = self.documents
        if ends is not None and (
            not ends or ends[0] != 0 or ends[-1] != self.total or list(ends) != sorted(ends)
        ):
            raise ValueError(
                f"documents is {short(ends)}; it must begin with 0, never decrease and end with the number "
                f"of rows, {self.total}"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.total, self.ranks, self.documents))

    def __setstate__(self, state: dict[str, object]) -> None:
        # Each process hashes text in its own way: a pickled layout leaves its hash behind.
        self.__dict__.update({name: value for name, value in state.items() if name != "_hash"})

    # ------------------------------------------------------------------ constructors
    @classmethod
    def contiguous(cls, total: int, world: int, *, documents: Iterable[int] | Tensor | None = None) -> Layout:
        """Rank r holds the r-th part, of the sizes of ``torch.chunk``, as a DTensor of ``Shard`` does.

        With a causal mask the last rank computes most: prefer ``zigzag``.
        """
        check_sizes(total, world)
        size = max(1, -(-total // world))
        cuts = [min(total, size * rank) for rank in range(world + 1)]
        runs = [_runs(range(a, b)) for a, b in itertools.pairwise(cuts)]
        return cls("contiguous", total, tuple(runs), checked_documents(documents))

    @classmethod
    def zigzag(cls, total: int, world: int, *, documents: Iterable[int] | Tensor | None = None) -> Layout:
        """Of 2 * world parts, as equal as can be, rank r holds part r and part 2 * world - 1 - r.

        With a causal mask all ranks compute equally much.
        """
        check_sizes(total, world)
        parts = _parts(0, total, 2 * world)
        runs = [_runs(parts[rank], parts[2 * world - 1 - rank]) for rank in range(world)]
        return cls("zigzag", total, tuple(runs), checked_documents(documents))

    @classmethod
    def striped(
        cls, total: int, world: int, *, block: int = 1, documents: Iterable[int] | Tensor | None = None
    ) -> Layout:
        """Blocks of ``block`` rows are dealt out to the ranks one by one."""
        check_sizes(total, world)
        check_count("block", block)
        if block == 1:
            runs = [_runs(range(rank, total, world)) for rank in range(world)]
        else:
            starts = [range(rank * block, total, world * block) for rank in range(world)]
            runs = [_runs(*(range(a, min(a + block, total)) for a in of_rank)) for of_rank in starts]
        return cls("striped", total, tuple(runs), checked_documents(documents))

    @classmethod
    def windowed(
        cls, total: int, world: int, window: int, *, documents: Iterable[int] | Tensor | None = None
    ) -> Layout:
        """The first ``window`` rows are dealt out as ``zigzag`` does, the others as ``contiguous``.

        With a causal window all ranks compute equally much: rows behind the first ``window`` see equally many
        keys each. ``zigzag`` gives rank 0 the first rows, which see few.
        """
        check_sizes(total, world)
        check_count("window", window, 0)
        head = min(window, total)
        parts, others = _parts(0, head, 2 * world), _parts(head, total, world)
        runs = [_runs(parts[rank], parts[2 * world - 1 - rank], others[rank]) for rank in range(world)]
        return cls("windowed", total, tuple(runs), checked_documents(documents))

    @classmethod
    def per_document(cls, documents: Iterable[int] | Tensor, world: int) -> Layout:
        """Each packed document is dealt out by itself as ``zigzag`` does.

        Args:
            documents: 0 and the end of each document, the ``cu_seqlens`` of ``attention_varlen``.
            world: the number of ranks.
        """
        ends = checked_documents(documents)
        if not ends:
            raise ValueError("documents is empty; it must be 0 and the end of each document")
        check_sizes(ends[-1], world)
        runs: list[list[range]] = [[] for _ in range(world)]
        # Short documents have fewer rows than parts. The ranks take turns at being first, so that the rows
        # that are left over do not all go to rank 0.
        for number, (first, last) in enumerate(itertools.pairwise(ends)):
            parts = _parts(first, max(first, last), 2 * world)
            for rank in range(world):
                place = (rank + number) % world
                runs[rank] += [parts[place], parts[2 * world - 1 - place]]
        return cls("per_document", ends[-1], tuple(_runs(*r) for r in runs), ends)

    @classmethod
    def explicit(
        cls,
        positions: Sequence[Sequence[int] | Tensor],
        *,
        documents: Iterable[int] | Tensor | None = None,
    ) -> Layout:
        """``positions[r]`` are the positions of the rows of rank r; each position belongs to one rank."""
        if isinstance(positions, Tensor) or not isinstance(positions, Sequence):
            raise TypeError(
                f"positions is {given(positions)}; it must be a list with positions for each rank"
            )
        numbers = [checked_numbers("positions", of_rank) for of_rank in positions]
        runs = tuple(_compressed(of_rank) for of_rank in numbers)
        return cls("explicit", sum(map(len, numbers)), runs, checked_documents(documents))

    # ------------------------------------------------------------------ what a rank holds
    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """(rows of the rank,) int64: the positions of its rows in the sequence."""
        runs = self.ranks[self._checked(rank)]
        device = torch.device("cpu") if device is None else device
        pieces = [torch.arange(r.start, r.stop, r.step, device=device) for r in runs]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The rows of one rank, from all; contiguous, differentiable."""
        self._check_rows("x", x, dim, self.total)
        return x.index_select(dim, self.positions(rank, x.device))

    def unshard(self, shards: Sequence[Tensor], dim: int = 1) -> Tensor:
        """All rows in the order of the sequence, from the rows of every rank; differentiable.

        ``flash_attention.distributed.gather`` does it across the ranks of a group.
        """
        if isinstance(shards, Tensor) or not isinstance(shards, Sequence) or len(shards) != self.world:
            is_list = isinstance(shards, Sequence) and not isinstance(shards, Tensor)
            number = f"{len(shards)} tensors" if is_list else given(shards)
            raise ValueError(
                f"shards is {number}; it must be {self.world} tensors, one a rank in their order"
            )
        for rank, x in enumerate(shards):
            self._check_rows(f"shards[{rank}]", x, dim, self.lengths[rank])
            if x.ndim != shards[0].ndim or _beside(x, dim) != _beside(shards[0], dim):
                raise ValueError(
                    f"shards[{rank}] has shape {tuple(x.shape)} and shards[0] {tuple(shards[0].shape)}; they "
                    f"must be equal in all dimensions but {dim}"
                )
        order = torch.cat([self.positions(rank, shards[0].device) for rank in range(self.world)])
        return torch.cat(list(shards), dim).index_select(dim, order.argsort())

    def document(self, position: int) -> int:
        """The number of the document that a position is in."""
        return 0 if self.documents is None else bisect_right(self.documents, position) - 1

    def _checked(self, rank: int) -> int:
        if type(rank) is not int or not 0 <= rank < self.world:
            raise ValueError(f"rank is {given(rank)}; it must be an int from 0 to {self.world - 1}")
        return rank

    def _check_rows(self, name: str, x: Tensor, dim: int, rows: int) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {given(x)}; it must be a tensor")
        if type(dim) is not int:
            raise TypeError(f"dim is {given(dim)}; it must be an int, the dimension of the rows")
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != rows:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; dimension {dim} must have {rows} rows: this layout "
                f"({self.name}) has {self.total} rows on {self.world} ranks, {short(self.lengths)}"
            )


# ---------------------------------------------------------------------- parts
def _beside(x: Tensor, dim: int) -> list[int]:
    """The sizes of the other dimensions."""
    sizes = list(x.shape)
    del sizes[dim]
    return sizes


def _parts(first: int, last: int, number: int) -> list[range]:
    """``number`` ranges that are as equal as can be; the longer ones come first."""
    size, longer = divmod(last - first, number)
    ends = [first + size * i + min(i, longer) for i in range(number + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def _runs(*pieces: range) -> tuple[range, ...]:
    """Without empty ranges; those that go on where one ends are joined to it."""
    found: list[range] = []
    for piece in pieces:
        if not piece:
            continue
        piece = range(piece[0], piece[-1] + 1, piece.step if len(piece) > 1 else 1)
        if found and piece.step == found[-1].step == 1 and found[-1].stop == piece.start:
            piece = range(found.pop().start, piece.stop)
        found.append(piece)
    return tuple(found)


def _compressed(numbers: list[int]) -> tuple[range, ...]:
    """The longest ranges that count upwards, from left to right."""
    runs: list[range] = []
    i = 0
    while i < len(numbers):
        j = i + 1
        if j < len(numbers) and numbers[j] > numbers[i]:
            step = numbers[j] - numbers[i]
            while j < len(numbers) and numbers[j] - numbers[j - 1] == step:
                j += 1
            # Two numbers make no rhythm unless they are neighbours.
            if j - i == 2 and step > 1:
                j = i + 1
        runs.append(range(numbers[i], numbers[j - 1] + 1, numbers[i + 1] - numbers[i] if j - i > 1 else 1))
        i = j
    return tuple(runs)
