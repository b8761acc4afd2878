"""What ``attention`` is asked to compute: shapes and features, without any tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.numeric_class import INVARIANT
from flash_helpers.mods.mod import Mod

Window = tuple[int | None, int | None]
UNLIMITED: Window = (None, None)
FORWARD = "forward"
"""The direction of kernels, rows and files that name none."""
BACKWARD = "backward"
"""The direction of the kernels that compute gradients."""
MODS = (("score_mod", "score"), ("mask_mod", "visible"))  # arguments of attention, and results of a mod
HEAD_SIZES = range(8, 257, 8)
MAX_DECODE_ROWS = 64  # queries, or heads of a group, that one tile of the smallest kernels takes
MAX_SPLITS = 256  # ``kMaxSplits`` of ``split_combine.cuh``: the parts that can be combined
MIN_DECODE_KEYS = 1024  # with fewer, begin and end of a block count more than its copies


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call as ``select`` sees it. Hashable, free of torch.

    Attributes:
        dtype: element type.
        batch: batch items; of packed tensors, sequences.
        seq_len_q: queries; of packed tensors, the most of one sequence.
        seq_len_k: keys; likewise.
        n_heads: query heads.
        n_heads_kv: heads of K and V; query head h reads kv head h // (n_heads // n_heads_kv).
        d_head: head size of Q and K.
        d_head_v: head size of V and O.
        left: a query at its own place p sees the keys from p - left on; None: from the first one on. The last
            query's own place is the last key (bottom-right alignment).
        right: it sees the keys up to p + right; None: up to the last one. Causal is 0. Both have either sign.
        softcap: logits are soft-capped.
        sinks: each head has one more logit without a value.
        varlen: packed sequences of several lengths.
        cached: not packed, but of each batch item only so many keys exist as a tensor on the device says;
            seq_len_k is the capacity. ``varlen`` is on.
        paged: keys lie in pages, which a table on the device names; ``cached`` is on.
        planned: queries are packed, and a tensor on the device says how many of a sequence's keys, or
            queries, count: the kernel finds its work, and the parts of the keys, on the device. ``cached``
            is on.
        lse: the log-sum-exp is wanted.
        out_float32: the output is float32 and is not rounded.
        n_sms: SMs that the call may use; None: all of the device.
        tma_obstacle: why bulk copies (TMA) cannot reach a tensor, or None.
        direction: what is computed of it: ``forward``, or ``backward``, the gradients.
        deterministic: of the gradients: equal calls have to give equal bits. The forward pass always does.
        mod: what ``score_mod`` and ``mask_mod`` compute, or None.
        captured_gradients: of the gradients: places of the tensors that the mod captures and of which
            gradients are wanted.
        float_key_gradients: of the gradients: those of keys and values are float32 and not rounded.
        float_query_gradients: likewise those of queries.
        dropout: weights are dropped behind the softmax.
        invariant: a query's output and LSE have the same bits in every call (``numerics="invariant"``).
    """

    dtype: DType
    batch: int
    seq_len_q: int
    seq_len_k: int
    n_heads: int
    n_heads_kv: int
    d_head: int
    d_head_v: int
    left: int | None = None
    right: int | None = None
    softcap: bool = False
    sinks: bool = False
    varlen: bool = False
    cached: bool = False
    paged: bool = False
    planned: bool = False
    lse: bool = False
    tma_obstacle: str | None = None
    out_float32: bool = False
    n_sms: int | None = None
    direction: str = FORWARD
    deterministic: bool = False
    mod: Mod | None = None
    captured_gradients: tuple[int, ...] = ()
    float_key_gradients: bool = False
    float_query_gradients: bool = False
    dropout: bool = False
    invariant: bool = False

    def backward(
        self,
        deterministic: bool = False,
        captured_gradients: tuple[int, ...] = (),
        float_key_gradients: bool = False,
        float_query_gradients: bool = False,
    ) -> AttentionProblem:
        """The gradients of this problem. Tensors that a kernel cannot reach are copied for it.

        Args:
            deterministic: see ``AttentionProblem``.
            captured_gradients: see ``AttentionProblem``.
            float_key_gradients, float_query_gradients: see ``AttentionProblem``.
        """
        return _backward_of(
            self, deterministic, captured_gradients, float_key_gradients, float_query_gradients
        )

    @property
    def masked(self) -> bool:
        """Some query does not see some key."""
        return self.left is not None or self.right is not None

    @property
    def causal(self) -> bool:
        """The only limit is that a query sees nothing after its own place."""
        return self.left is None and self.right == 0

    @property
    def decoding(self) -> bool:
        """Few queries read many keys: the time goes into reading K and V."""
        return self.seq_len_q <= MAX_DECODE_ROWS and self.seq_len_k >= MIN_DECODE_KEYS

    @property
    def rows_of_sequence(self) -> int:
        """The most rows that the queries of a sequence are for a kernel: planned ones have grouped heads as
        rows."""
        group = self.n_heads // self.n_heads_kv if self.planned and self.n_heads_kv else 1
        return self.seq_len_q * group

    def reads_keys_once(self, B_r: int) -> bool:
        """Whether no two blocks of B_r rows read the same keys, as of sequences that decode."""
        heads_share = self.n_heads != self.n_heads_kv and not self.planned
        return self.rows_of_sequence <= B_r and not heads_share

    @property
    def sees_nothing(self) -> bool:
        """No query sees any key, in no sequence up to the longest."""
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            return True
        before = self.right is not None and self.right <= -self.seq_len_k
        return before or (self.left is not None and self.left <= -self.seq_len_q)

    def with_rows_packed(self) -> AttentionProblem:
        """The same as a kernel is given it: without the last keys, if no query sees them, and with few heads.

        Without these keys the last query's own place is the last key that it sees, so that a right limit
        below 0 becomes 0. Of a single query the kv heads read their keys once: the query heads of a group
        become the rows of one head, and keys that a window hides are left out. Sinks differ within a group,
        and packed sequences have offsets of their own: they stay as they are. So does a window over a cache,
        whose last key only the device knows.
        """
        if self.direction != FORWARD or self.planned or self.sees_nothing:
            return self
        if self.varlen and not self.cached:
            return self
        if self.has_mod:  # its places are those of the call
            return self
        if self.invariant and self.left is not None:  # tiles of keys are counted from key 0
            return self
        if self.right is not None and self.right < 0 and not self.cached:
            left = None if self.left is None else self.left + self.right
            cut = replace(self, seq_len_k=self.seq_len_k + self.right, left=left, right=0)
            return cut.without_idle_limits().with_rows_packed()
        if self.seq_len_q != 1:
            return self
        group = self.n_heads // self.n_heads_kv if self.n_heads_kv else 1
        if self.cached:
            if self.sinks or group == 1 or self.masked:
                return self
            return replace(self, seq_len_q=group, n_heads=self.n_heads_kv)
        keys = self.seq_len_k if self.left is None else self.left + 1
        if self.sinks or group == 1:
            return self if keys == self.seq_len_k else replace(self, seq_len_k=keys, left=None)
        return replace(self, seq_len_q=group, n_heads=self.n_heads_kv, seq_len_k=keys, left=None)

    def without_idle_limits(self) -> AttentionProblem:
        """The same without limits that hide nothing, as that of a single causal query."""
        left, right = visible_limits(False, (self.left, self.right), self.seq_len_q, self.seq_len_k)
        return replace(self, left=left, right=right)

    def keys_of_block(self, B_r: int) -> int:
        """The most keys that a block of B_r neighbouring queries visits."""
        keys = self.seq_len_k + min(self.right or 0, 0)  # up to the last query's last one
        if self.left is not None:
            if self.right is not None:
                keys = min(keys, self.left + B_r + self.right)
            if self.left < 0:  # from the first query's first one on
                keys = min(keys, self.seq_len_q + self.left)
        return max(keys, 0)

    def features(self) -> dict[str, bool]:
        """What a kernel must be compiled for, by the names of the traits of its direction."""
        features = {
            "causal": self.causal,
            "window": self.masked and not self.causal,  # a causal window too: its right limit is 0
            "softcap": self.softcap and not self.has_mod,
            "sinks": self.sinks,
            "varlen": self.varlen,
            "paged": self.paged,
            "planned": self.planned,
        }
        if self.direction != FORWARD:  # gradients feel sinks through the LSE alone, and pages have none
            del features["sinks"], features["paged"], features["planned"]
            features["float_key_gradients"] = self.float_key_gradients
            features["float_query_gradients"] = self.float_query_gradients
        return features

    @property
    def mod_hides_keys(self) -> bool:
        """Whether there is a ``mask_mod``, whatever it hides."""
        return self.mod is not None and self.mod.result("visible") is not None

    @property
    def has_mod(self) -> bool:
        """Whether a kernel is compiled with a mod: with functions of the user's, or with dropout."""
        return self.mod is not None or self.dropout

    @property
    def compiled_mod(self) -> Mod | None:
        """The mod that a kernel is compiled with: with a soft cap, as kernels with a mod have none, with
        dropout, and of gradients with its derivatives."""
        if not self.has_mod:
            return None
        from flash_helpers.mods.backward import backward_mod
        from flash_helpers.mods.capped import capped
        from flash_helpers.mods.dropped import NOTHING, dropped

        mod = self.mod or NOTHING
        mod = capped(mod) if self.softcap else mod
        mod = dropped(mod) if self.dropout else mod
        return mod if self.direction == FORWARD else backward_mod(mod, self.captured_gradients)

    def label(self) -> str:
        """A short text for reasons, e.g. ``bf16 b2 h8/2 s512x1024 d128 causal``."""
        heads = f"h{self.n_heads}" + (f"/{self.n_heads_kv}" if self.n_heads_kv != self.n_heads else "")
        seq = f"s{self.seq_len_q}" + (f"x{self.seq_len_k}" if self.seq_len_k != self.seq_len_q else "")
        d = f"d{self.d_head}" + (f"/{self.d_head_v}" if self.d_head_v != self.d_head else "")
        words = [] if self.direction == FORWARD else [self.direction]
        words += [self.dtype.name.lower(), f"b{self.batch}", heads, seq, d]
        words += [name for name, on in self.features().items() if on]
        if self.has_mod:
            words += ["softcap"] * self.softcap
        if self.mod is not None:
            words += [word for word, result in MODS if self.mod.result(result) is not None]
        words += ["dropout"] * self.dropout
        words += ["deterministic"] * self.deterministic
        words += [INVARIANT] * self.invariant
        if self.out_float32:
            words.append("float32 output")
        if self.n_sms is not None:
            words.append(f"on {self.n_sms} SMs")
        return " ".join(words)


@lru_cache(1024)
def _backward_of(
    problem: AttentionProblem,
    deterministic: bool,
    captured_gradients: tuple[int, ...],
    float_key_gradients: bool,
    float_query_gradients: bool,
) -> AttentionProblem:
    """Remembered, since each call of a training step asks for it."""
    return replace(
        problem,
        lse=False,
        tma_obstacle=None,
        out_float32=False,  # it is rounded before products, as the others are
        invariant=False,  # it is about the forward pass
        direction=BACKWARD,
        deterministic=deterministic,
        captured_gradients=captured_gradients,
        float_key_gradients=float_key_gradients,
        float_query_gradients=float_query_gradients,
    )


def visible_limits(
    causal: bool, window: Window, seq_len_q: int, seq_len_k: int
) -> tuple[int | None, int | None]:
    """(left, right) of a problem from the arguments of a call. Limits that hide nothing become None.

    No query has more than ``seq_len_k - 1`` keys before its place or more than ``seq_len_q - 1`` after
    it, so that, for instance, a single causal query needs no mask at all.
    """
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    if left is not None and left >= seq_len_k - 1:
        left = None
    if right is not None and right >= seq_len_q - 1:
        right = None
    return left, right
