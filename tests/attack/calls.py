"""Random calls on the CPU: valid ones against the float64 reference, invalid ones have to be refused."""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from outcome import Outcome
from torch import Tensor

from flash_attention import attention, attention_varlen
from flash_attention.cached import attention_cached
from flash_helpers.kernel_configs import DType
from flash_helpers.test.cases import LAYOUTS, Case

OURS = tuple(
    str(Path(__file__).resolve().parents[2] / name) for name in ("flash_attention", "py/flash_helpers")
)
REFUSED = (TypeError, ValueError, NotImplementedError)
LENGTHS = (0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 63, 64, 65)
SCALES = (None, None, 0.0, 0.05, 1.0, -0.3)


def valid_calls(n: int, seed: int = 0) -> Outcome:
    """``n`` calls of ``attention`` and ``attention_cached`` with random shapes, features and layouts."""
    torch.set_num_threads(1)  # small tensors: threads would wait for each other
    outcome = Outcome("valid call")
    for number in range(n):
        case = random_case(random.Random(1_000_000 * seed + number))
        name = "attention_cached" if case.page_size else "attention"
        outcome.tried[name] += 1
        try:
            case.check("cpu")
        except Exception as error:
            outcome.fail(name, number, f"{error!r} of {case}")
    return outcome


def random_case(rng: random.Random) -> Case:
    """A small case that the CPU backend takes."""
    d_head = 8 * rng.choice((1, 2, 3, 4, 8, 12, 16, 32))
    batch, seq_len_k, page_size = rng.randrange(4), rng.choice(LENGTHS), 0
    used: tuple[int, ...] = ()
    layouts = [rng.choice(LAYOUTS) for _ in range(3)]
    if rng.random() < 0.3:
        page_size = rng.choice((16, 32, 48, 64))
        seq_len_k = max(1, -(-seq_len_k // page_size)) * page_size
        used = tuple(rng.randrange(seq_len_k + 5) for _ in range(batch))
        layouts[1:] = [name.replace("one_batch", "contiguous") for name in layouts[1:]]
    limits = (None, 0, 1, 4, 20, 300, -1, -7)
    return Case(
        dtype=rng.choice(list(DType)),
        batch=batch,
        seq_len_q=rng.choice(LENGTHS),
        seq_len_k=seq_len_k,
        n_heads_kv=rng.randrange(1, 4),
        group=rng.randrange(1, 5),
        d_head=d_head,
        d_head_v=rng.choice((d_head, d_head, 8 * rng.randrange(1, 17))),
        causal=rng.random() < 0.5,
        window=(rng.choice(limits), rng.choice(limits)) if rng.random() < 0.4 else (None, None),
        softmax_scale=rng.choice(SCALES),
        softcap=rng.choice((0.0, 0.0, 1.0, 20.0)),
        sinks=rng.random() < 0.3,
        magnitude=rng.choice((1.0, 1.0, 0.0, 4.0)),
        layouts=(layouts[0], layouts[1], layouts[2]),
        seed=rng.randrange(1000),
        page_size=page_size,
        used=used,
    )


# ---------------------------------------------------------------- invalid ones
@dataclass
class Call:
    """A call that is valid until a mistake is made in it."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


Mistake = Callable[[Call, random.Random], "dict[str, Any] | None"]
"""Gives the arguments to replace, or None where the call is not open to it."""


def invalid_calls(n: int, seed: int = 0) -> Outcome:
    """``n`` calls with one mistake each: refused by an error of the library's own, with a message."""
    outcome = Outcome("invalid call")
    names = list(MISTAKES)
    for number in range(n):
        rng = random.Random(1_000_000 * seed + number)
        name = names[number % len(names)]
        call = random_call(rng)
        changes = MISTAKES[name](call, rng)
        while changes is None:
            call = random_call(rng)
            changes = MISTAKES[name](call, rng)
        target = call.function.__name__
        outcome.tried[target] += 1
        call.arguments.update(changes)
        try:
            call.function(**call.arguments)
            outcome.fail(f"{target} with {name}", number, "it was computed")
        except REFUSED as error:
            where = traceback.extract_tb(error.__traceback__)[-1].filename
            if not where.startswith(OURS) and name != "an unknown keyword":
                outcome.fail(f"{target} with {name}", number, f"not refused by us but in {where}: {error!r}")
            elif len(str(error)) < 15:
                outcome.fail(f"{target} with {name}", number, f"says nothing: {error!r}")
        except Exception as error:
            outcome.fail(f"{target} with {name}", number, error)
    return outcome


def random_call(rng: random.Random) -> Call:
    """A small valid call."""
    dtype = rng.choice((torch.float16, torch.bfloat16))
    heads_kv, group, d_head = rng.randrange(1, 3), rng.randrange(1, 3), 8 * rng.randrange(1, 9)
    options = {"causal": rng.random() < 0.5, "softmax_scale": rng.choice(SCALES)}
    seq_q, seq_k, batch = rng.randrange(1, 9), rng.randrange(1, 17), rng.randrange(1, 3)

    def tensor(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    q_rest, kv_rest = (heads_kv * group, d_head), (heads_kv, d_head)
    match rng.randrange(4):
        case 0:
            ends_q, ends_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (seq_q, seq_k))
            q, k, v = tensor(2 * seq_q, *q_rest), tensor(2 * seq_k, *kv_rest), tensor(2 * seq_k, *kv_rest)
            packed = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
            return Call(attention_varlen, {**packed, "max_seqlen_q": seq_q, "max_seqlen_k": seq_k, **options})
        case 1:
            used = torch.full((batch,), seq_k, dtype=torch.int32)
            cache = {"q": tensor(batch, seq_q, *q_rest), "k": tensor(batch, seq_k, *kv_rest)}
            return Call(
                attention_cached, {**cache, "v": tensor(batch, seq_k, *kv_rest), "seqused_k": used, **options}
            )
        case _:
            q, k, v = (
                tensor(batch, seq_q, *q_rest),
                tensor(batch, seq_k, *kv_rest),
                tensor(batch, seq_k, *kv_rest),
            )
            return Call(attention, {"q": q, "k": k, "v": v, **options})


def _one_tensor(change: Callable[[Tensor], Any], names: str = "qkv") -> Mistake:
    def mistake(call: Call, rng: random.Random) -> dict[str, Any]:
        name = rng.choice(names)
        return {name: change(call[name])}

    return mistake


def _option(name: str, *values: Any) -> Mistake:
    return lambda call, rng: {name: rng.choice(values)}


def _widened(x: Tensor, axis: int) -> Tensor:
    return torch.cat([x, x.narrow(axis, 0, 1)], axis)


def _only(function: Callable[..., Any], mistake: Mistake) -> Mistake:
    return lambda call, rng: mistake(call, rng) if call.function is function else None


def _changed(function: Callable[..., Any], name: str, change: Callable[[Tensor], Any]) -> Mistake:
    return _only(function, lambda call, rng: {name: change(call[name])})


def _other_heads(call: Call, rng: random.Random) -> dict[str, Any]:
    return {"k": _widened(call["k"], -2)}


def _heads_that_do_not_divide(call: Call, rng: random.Random) -> dict[str, Any] | None:
    return {"q": _widened(call["q"], -2)} if call["k"].shape[-2] == 2 else None


def _out(make: Callable[[Call, Tensor], Any]) -> Mistake:
    return lambda call, rng: {"out": make(call, torch.empty_like(call["q"]))}


MISTAKES: dict[str, Mistake] = {
    "no tensor": _one_tensor(lambda x: None),
    "a list": _one_tensor(lambda x: [[1.0, 2.0]]),
    "a number": _one_tensor(lambda x: 1.5),
    "float32": _one_tensor(lambda x: x.float()),
    "integers": _one_tensor(lambda x: x.int()),
    "complex numbers": _one_tensor(lambda x: x.to(torch.complex64)),
    "bool": _one_tensor(lambda x: x.bool()),
    "the other 16-bit type": _one_tensor(
        lambda x: x.to(torch.float16 if x.dtype is torch.bfloat16 else torch.bfloat16)
    ),
    "a dimension too few": _one_tensor(lambda x: x[0]),
    "a dimension too many": _one_tensor(lambda x: x[None]),
    "another device": _one_tensor(lambda x: x.to("meta")),
    "a sparse tensor": _one_tensor(lambda x: x.to_sparse()),
    "a head size that is no multiple of 8": lambda call, rng: {
        name: call[name][..., :-1].contiguous() for name in ("q", "k")
    },
    "another head size of k": lambda call, rng: {"k": torch.cat([call["k"]] * 2, -1)},
    "a head size of 0": lambda call, rng: {name: call[name][..., :0] for name in ("q", "k")},
    "heads that do not divide": lambda call, rng: (
        {"q": torch.cat([call["q"]] * 2 + [call["q"][..., :1, :]], -2)} if call["k"].shape[-2] == 2 else None
    ),
    "more keys than values": lambda call, rng: {"k": _widened(call["k"], -3)},
    "other heads of k": _other_heads,
    "another batch": _only(attention, lambda call, rng: {"k": _widened(call["k"], 0)}),
    "a scale that is no number": _option("softmax_scale", "1", [1.0], {}, object(), 1j),
    "a scale that is not finite": _option("softmax_scale", math.nan, math.inf, -math.inf),
    "a soft cap below 0": _option("softcap", -1.0, math.nan, math.inf, "20", None, [1.0]),
    "a causal that is no bool": _option("causal", 2, "yes", None, 0.0, [], torch.tensor(True)),
    "a window of another shape": _option("window", (1,), (1, 2, 3), 5, "ab", (None,), object()),
    "a window of no integers": _option("window", (0.5, 1), ("1", 2), (1.0, 2.0), ([], 1)),
    "sinks of another shape": _option("sinks", torch.zeros(17), torch.zeros(1, 1), torch.zeros(())),
    "sinks of another type": _option("sinks", torch.zeros(2, dtype=torch.int32), [0.0], 1.0, "sinks"),
    "an out of another shape": _out(lambda call, out: torch.cat([out, out])),
    "an out of another type": _out(lambda call, out: out.float()),
    "an out that is an input": lambda call, rng: {"out": call["q"]},
    "an out that overlaps itself": _out(lambda call, out: out[..., :1].expand(out.shape)),
    "an out that is no tensor": _out(lambda call, out: [out]),
    "a config that is none": _option("config", "fast", 5, object()),
    "a backend that is none": _option("backend", "gpu", "", 5),
    "the CUDA backend": _option("backend", "cuda"),
    "an unknown keyword": lambda call, rng: {
        rng.choice(("is_causal", "scale", "attn_mask", "dropout_p", "window_size", "bias")): 0
    },
    "offsets of another type": _changed(attention_varlen, "cu_seqlens_q", Tensor.long),
    "offsets that fall": _only(
        attention_varlen, lambda call, rng: {"cu_seqlens_k": call["cu_seqlens_k"].flip(0)}
    ),
    "offsets behind the end": _only(
        attention_varlen, lambda call, rng: {"cu_seqlens_q": call["cu_seqlens_q"] * 2}
    ),
    "offsets in two dimensions": _changed(attention_varlen, "cu_seqlens_q", lambda ends: ends[None]),
    "a length below those that are there": _only(attention_varlen, lambda call, rng: {"max_seqlen_k": -1}),
    "a length that is no integer": _only(attention_varlen, _option("max_seqlen_q", "4", None, 1.5)),
    "counts of another type": _only(
        attention_cached, lambda call, rng: {"seqused_k": call["seqused_k"].float()}
    ),
    "counts of another batch": _only(
        attention_cached, lambda call, rng: {"seqused_k": _widened(call["seqused_k"], 0)}
    ),
}
