"""Checks of single options: flags, numbers, windows, and arguments that ask for what there is not."""

from __future__ import annotations

import math
import reprlib
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from flash_attention.checks.tensors import check_no_gradient, check_tensors
from flash_helpers.kernels.numeric_class import FAST, INVARIANT
from flash_helpers.kernels.problem import MAX_SPLITS, Window
from flash_helpers.messages import named_type

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_TINY = torch.finfo(torch.float32).tiny


def given(value: object) -> str:
    """A value in a message: short, and of a tensor no elements, which may have to be waited for."""
    if isinstance(value, Tensor) and not value.is_nested:
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype} on {value.device}"
    if isinstance(value, Tensor | np.ndarray):
        return named_type(value)
    return reprlib.repr(value)


def checked_flag(name: str, value: object, also: str = "") -> bool:
    """True or False. TypeError: neither, nor 0 or 1, nor numpy's; any text would count as true.

    Args:
        also: what else the caller takes, for the message.
    """
    if isinstance(value, bool | np.bool_) or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name} is {given(value)}; it must be True or False{also}")


def checked_scale(softmax_scale: float | None, d_head: int, name: str = "softmax_scale") -> float:
    """The factor of the scores; None: d_head ** -0.5.

    Raises:
        TypeError: not a number that the host can read without waiting.
        ValueError: not finite in float32.
        NotImplementedError: a tensor that requires grad, in grad mode.
    """
    if softmax_scale is None:
        return d_head**-0.5
    scale = checked_number(name, softmax_scale)
    if not abs(scale) <= FLOAT32_MAX:
        raise ValueError(
            f"{name} is {scale}; it must be finite in float32: None means d_head ** -0.5, and 0.0 means zero"
        )
    return scale


def checked_softcap(softcap: float) -> float:
    """The bound of the logits; 0: none. TypeError: no number; ValueError: negative, no finite float32.

    A cap below the smallest normal float32 is raised to it: no score differs, and as a float32 it is not 0.
    """
    cap = checked_number("softcap", softcap)
    if not 0 <= cap <= FLOAT32_MAX:
        raise ValueError(f"softcap is {cap}; it must be finite in float32 and at least 0: 0.0 means no cap")
    return max(cap, FLOAT32_TINY) if cap else cap


def checked_dropout(dropout_p: float) -> float:
    """The probability that a weight is dropped. TypeError: no number; ValueError: not from 0 to below 1."""
    p = checked_number("dropout_p", dropout_p)
    if not 0 <= p < 1:
        raise ValueError(f"dropout_p is {p}; it must be from 0.0, which drops nothing, to below 1")
    return p


def checked_factors(softmax_scale: float | None, softcap: float) -> tuple[float | None, float]:
    """Both as numbers that compare equal only where they mean the same, of which True and 1.0 do not."""
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = checked_number("softmax_scale", softmax_scale)
    if type(softcap) is not float:
        softcap = checked_number("softcap", softcap)
    return softmax_scale, softcap


def checked_window(window: Window) -> Window:
    """(left, right), whole numbers of either sign, or None. Raises TypeError: anything else."""
    if not (isinstance(window, tuple | list) and len(window) == 2):
        raise TypeError(
            f"window is {given(window)}; it must be two values (left, right), e.g. (128, 0) or (None, None)"
        )
    left, right = window
    for name, limit in (("left", left), ("right", right)):
        if limit is None:
            continue
        if isinstance(limit, torch.SymInt):  # of a tracer; the call that runs has a number
            continue
        if type(limit) is not int:
            raise TypeError(
                f"window's {name} limit is {given(limit)}; it must be an int, or None for no limit"
            )
    return left, right


def checked_offset(diagonal_offset: int) -> int:
    """A whole number of keys. Raises TypeError: anything else, True also."""
    if type(diagonal_offset) is int or isinstance(diagonal_offset, torch.SymInt):
        return diagonal_offset
    # A tracer follows the text of a number, not that of anything.
    text = repr(diagonal_offset) if isinstance(diagonal_offset, float) else given(diagonal_offset)
    raise TypeError(
        f"diagonal_offset is {text}; it must be an int: by so many keys each query's own place moves"
    )


def checked_sms(n_sms: int | None) -> int | None:
    """How many SMs a call may use; None: all. TypeError: no int, True also; ValueError: less than 1."""
    if n_sms is None or isinstance(n_sms, torch.SymInt):
        return n_sms
    if type(n_sms) is not int:
        raise TypeError(f"n_sms is {given(n_sms)}; it must be an int, or None for all SMs of the device")
    if n_sms < 1:
        raise ValueError(f"n_sms is {n_sms}; it must be at least 1, or None for all SMs of the device")
    return n_sms


def checked_splits(n_splits: int | None) -> int | None:
    """Parts that keys are to be cut into; None: the library decides. TypeError, ValueError: anything else."""
    if n_splits is None or isinstance(n_splits, torch.SymInt):
        return n_splits
    if type(n_splits) is not int:
        raise TypeError(f"n_splits is {given(n_splits)}; it must be an int, or None: the library decides")
    if not 1 <= n_splits <= MAX_SPLITS:
        raise ValueError(
            f"n_splits is {n_splits}; it must be 1 to {MAX_SPLITS}, or None: the library decides"
        )
    return n_splits


def checked_numerics(numerics: str | None) -> str | None:
    """``invariant`` or None, which is ``fast``. TypeError: no text; ValueError: another one."""
    if numerics is None:
        return None
    if not isinstance(numerics, str):
        raise TypeError(f"numerics is {given(numerics)}; it must be {INVARIANT!r}, {FAST!r} or None")
    if numerics == FAST:
        return None
    if numerics != INVARIANT:
        raise ValueError(
            f"numerics is {given(numerics)}; it must be {INVARIANT!r}, for the same bits of a query in every "
            f"call, or {FAST!r}, which is None"
        )
    return numerics


def refuse_with_numerics(**arguments: object) -> None:
    """Raises NotImplementedError for the first argument that is not None: no invariant kernel has it."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is given with numerics={INVARIANT!r}; kernels of one numeric class take none: leave "
                f"{name} away, or numerics"
            )


def checked_out_dtype(out_dtype: torch.dtype | None, dtype: torch.dtype) -> torch.dtype:
    """The type of the output of a call on tensors of type ``dtype``. TypeError: neither that nor float32."""
    if out_dtype is None or out_dtype is dtype:
        return dtype
    if out_dtype is torch.float32:
        return out_dtype
    raise TypeError(
        f"out_dtype is {given(out_dtype)}; it must be torch.float32, {dtype} or None, which is the type of q"
    )


def checked_number(name: str, value: object) -> float:
    """A number, or a 0-d CPU tensor of one that wants no gradient. TypeError: anything else, True also."""
    if (
        isinstance(value, Tensor)
        and value.ndim == 0
        and value.device.type == "cpu"
        and value.dtype is not torch.bool
        and not value.dtype.is_complex
    ):
        check_tensors({name: value})
        check_no_gradient({name: value}, "a number has no gradient", "multiply q by a factor that is learnt")
        return float(value.detach())
    if isinstance(value, Real | torch.SymFloat | torch.SymInt) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number beyond float64; its sign does not matter to who refuses it
            return math.inf
    raise TypeError(
        f"{name} is {given(value)}; it must be a real number (or a 0-d CPU tensor of one): reading it must "
        "not wait for a device"
    )


# What asks for nothing, beside None.
NEUTRAL: dict[str, object] = {"dropout_p": 0, "return_debug_mask": False, "sm_margin": 0, "cp_rank": 0}


def refuse(**arguments: object) -> None:
    """Raises NotImplementedError for the first argument that asks for something; None never does."""
    for name, value in arguments.items():
        neutral = NEUTRAL.get(name)
        if value is None or (
            neutral is not None
            and isinstance(value, Real)
            and isinstance(value, bool) == isinstance(neutral, bool)
            and value == neutral
        ):
            continue
        raise NotImplementedError(
            f"{name} is {given(value)}; flash-attention-kernels has no such feature: pass {neutral}"
        )
