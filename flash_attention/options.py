"""What ``attention`` and its like are asked beside their tensors: one record, one place for its checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from flash_attention.checks import calls as checks
from flash_attention.checks.options import (
    checked_dropout,
    checked_flag,
    checked_numerics,
    checked_out_dtype,
    checked_sms,
    checked_softcap,
    checked_window,
    refuse_with_numerics,
)
from flash_helpers.kernels.kernel import BackwardConfig, ForwardConfig
from flash_helpers.kernels.problem import UNLIMITED, Window

# Defaults, which a call that leaves them out is known by: `is` asks for type and value at once.
NO_OFFSET, NO_SOFTCAP, NO_DROPOUT = 0, 0.0, 0.0


ScoreMod = Callable[..., Any]  # (score, b, h, q_idx, kv_idx), the new score
MaskMod = Callable[..., Any]  # (b, h, q_idx, kv_idx), whether the query sees the key


class Keywords(TypedDict, total=False):
    """The keywords of ``flash_attention.attention`` but ``return_lse``, which decides its result's type."""

    causal: bool
    softmax_scale: float | None
    window: Window
    softcap: float
    sinks: Tensor | None
    out: Tensor | None
    config: ForwardConfig | None
    backend: str | None
    diagonal_offset: int
    out_dtype: torch.dtype | None
    n_sms: int | None
    deterministic: bool
    backward_config: BackwardConfig | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    dropout_p: float
    dropout_seed: Tensor | None
    numerics: str | None


class Options(NamedTuple):
    """The keywords of ``flash_attention.attention``, which says what they mean."""

    causal: bool = False
    softmax_scale: float | None = None
    window: Window = UNLIMITED
    softcap: float = NO_SOFTCAP
    sinks: Tensor | None = None
    return_lse: bool = False
    out: Tensor | None = None
    config: ForwardConfig | None = None
    backend: str | None = None
    out_dtype: torch.dtype | None = None
    n_sms: int | None = None
    deterministic: bool = False
    backward_config: BackwardConfig | None = None
    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None
    dropout_p: float = NO_DROPOUT
    dropout_seed: Tensor | None = None
    numerics: str | None = None

    @property
    def has_mods(self) -> bool:
        """Whether functions of the user's change scores or hide keys."""
        return self.score_mod is not None or self.mask_mod is not None

    def checked(self, q: object) -> Options:
        """The same with values of the types that are promised.

        Raises:
            TypeError, ValueError, InfeasibleConfigError: what is wrong whatever the other tensors are.
        """
        causal = checked_flag("causal", self.causal)
        return_lse = checked_flag("return_lse", self.return_lse)
        deterministic = checked_flag("deterministic", self.deterministic)
        window, softcap = checked_window(self.window), checked_softcap(self.softcap)
        n_sms, out_dtype = checked_sms(self.n_sms), self.out_dtype
        dropout_p = checked_dropout(self.dropout_p)
        numerics = checked_numerics(self.numerics)
        if numerics is not None:
            refuse_with_numerics(
                score_mod=self.score_mod, mask_mod=self.mask_mod, dropout_p=dropout_p or None
            )
        if isinstance(q, Tensor):
            out_dtype = checked_out_dtype(out_dtype, q.dtype)
            checks.check_seed(self.dropout_seed, q)
        if isinstance(q, Tensor) and not (self.backend is self.config is self.backward_config is None):
            checks.check_choice(self.backend, self.config, q, self.backward_config)
        return self._replace(
            causal=causal,
            window=window,
            softcap=softcap,
            return_lse=return_lse,
            out_dtype=out_dtype,
            n_sms=n_sms,
            deterministic=deterministic,
            dropout_p=dropout_p,
            numerics=numerics,
        )
