"""The problem that ``flash-attention explain`` is asked about, as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.numeric_class import FAST, INVARIANT
from flash_helpers.kernels.pages import PAGE_ROWS, page_obstacle
from flash_helpers.kernels.problem import (
    BACKWARD,
    FORWARD,
    UNLIMITED,
    AttentionProblem,
    Window,
    visible_limits,
)

ALL = ("", "all", "none")  # a side of a window that has no limit


@dataclass(frozen=True)
class Asked:
    """Sizes and features.

    Attributes:
        batch, heads, seq_len: batch items, query heads, queries.
        heads_kv, seq_len_k, d_head_v: 0: as many as of Q.
        causal, window, softcap, sinks, lse: as of ``attention``; softcap and sinks are on or off.
        varlen: packed sequences, each as long as the longest.
        cached: keys in a cache of ``seq_len_k``, whose length only the device knows.
        paged: such a cache in pages.
        direction: ``forward`` or ``backward``.
        deterministic: of gradients: the same bits in every run.
        numerics: ``invariant``: by kernels of one numeric class; ``fast``: by any.
        page_size: rows of a page; 0: a multiple of 16, which bulk copies take.
        planned: queries over such a cache, or over packed keys, are packed too (``attention_varlen``).
    """

    batch: int = 16
    heads: int = 16
    seq_len: int = 4096
    heads_kv: int = 0
    seq_len_k: int = 0
    d_head_v: int = 0
    causal: bool = False
    window: Window = UNLIMITED
    softcap: bool = False
    sinks: bool = False
    lse: bool = False
    varlen: bool = False
    cached: bool = False
    paged: bool = False
    direction: str = FORWARD
    deterministic: bool = False
    numerics: str = FAST
    page_size: int = 0
    planned: bool = False

    def __post_init__(self) -> None:
        if self.direction not in (FORWARD, BACKWARD):
            raise ValueError(f"direction is {self.direction!r}; allowed: {FORWARD!r}, {BACKWARD!r}")
        if self.numerics not in (FAST, INVARIANT):
            raise ValueError(f"numerics is {self.numerics!r}; allowed: {INVARIANT!r}, {FAST!r}")
        if self.numerics != FAST and self.direction != FORWARD:
            raise ValueError("numerics is about the forward pass: leave it or --direction backward away")
        if self.paged and self.direction != FORWARD:
            raise ValueError("keys in pages have no gradient: leave --paged or --direction backward away")
        if self.planned and self.direction != FORWARD:
            raise ValueError(
                "packed queries over a cache have no gradient: leave --planned or --direction backward away"
            )
        if self.page_size and not self.paged:
            raise ValueError("--page-size is about a cache in pages: add --paged, or leave --page-size away")
        if self.page_size < 0:
            raise ValueError(
                f"page_size is {self.page_size}; it must be at least 1, or 0: a multiple of {PAGE_ROWS}"
            )
        for name in ("batch", "heads", "seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("heads_kv", "seq_len_k", "d_head_v"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, or 0: as of Q")
        if self.heads_kv and self.heads % self.heads_kv:
            raise ValueError(
                f"heads is {self.heads} and heads_kv {self.heads_kv}; heads must be a multiple of heads_kv"
            )

    def of_kernel(self, causal: bool, direction: str) -> Asked:
        """The same with a kernel's mask and direction."""
        if self.deterministic and direction == FORWARD:
            raise ValueError(
                "the kernel is of the forward pass, which always is deterministic: leave --deterministic away"
            )
        return replace(self, causal=causal, direction=direction)

    def problem(self, dtype: DType, d_head: int, d_head_v: int) -> AttentionProblem:
        """The problem as ``select`` sees it."""
        if self.deterministic and self.direction == FORWARD:
            raise ValueError("the forward pass always is deterministic: add --direction backward")
        seq_len_k = self.seq_len_k or self.seq_len
        left, right = visible_limits(self.causal, self.window, self.seq_len, seq_len_k)
        problem = AttentionProblem(
            dtype=dtype,
            batch=self.batch,
            seq_len_q=self.seq_len,
            seq_len_k=seq_len_k,
            n_heads=self.heads,
            n_heads_kv=self.heads_kv or self.heads,
            d_head=d_head,
            d_head_v=d_head_v,
            left=left,
            right=right,
            softcap=self.softcap,
            sinks=self.sinks,
            varlen=self.varlen or self.cached or self.paged or self.planned,
            cached=self.cached or self.paged or self.planned,
            paged=self.paged,
            planned=self.planned,
            lse=self.lse,
            tma_obstacle=page_obstacle(self.page_size) if self.paged else None,
            invariant=self.numerics == INVARIANT,
        )
        return problem if self.direction == FORWARD else problem.backward(self.deterministic)


def parse_window(text: str) -> Window:
    """Reads ``--window``: ``1024,0``, ``all,0``, ``all,-2``, or one number for both sides.

    Raises:
        ValueError: something else.
    """
    if not text:
        return UNLIMITED
    sides = [part.strip() for part in text.split(",")]
    if len(sides) == 1:
        sides *= 2
    try:
        if len(sides) != 2:
            raise ValueError
        left, right = (None if side in ALL else int(side) for side in sides)
    except ValueError:
        raise ValueError(
            f"--window is {text!r}; it must be LEFT,RIGHT: the keys that a query sees before and after its "
            "own place, each a number of either sign or all, such as 1024,0 or all,-2"
        ) from None
    return left, right
