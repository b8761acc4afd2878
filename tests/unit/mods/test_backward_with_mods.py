"""The CPU backend's backward pass through functions of the user's, against PyTorch's gradients in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flash_attention.backends import cpu, cpu_backward
from flash_attention.backends.cpu_backward import Gradients
from flash_attention.backends.cpu_mods import BlockMods
from flash_attention.mods import trace
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig
from flash_helpers.test.reference import reference, reference_gradients

CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 64, 4, True, True, True, 0, 2, 2, True, True)
BATCH, HEADS, HEADS_KV, D = 2, 4, 2, 16
SEQ_Q, SEQ_K = 60, 100
_rng = torch.Generator().manual_seed(4)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_rng, dtype=torch.float32)


TABLES = {
    "slopes": real(HEADS),
    "distance": real(HEADS, SEQ_Q + SEQ_K),
    "bias": real(1, 1, SEQ_Q, SEQ_K),
    "few": real(5),
}  # fmt: skip


def mask(b, h, q, k):
    return ((q + k + h + b) % 3 != 0) & (q // 20 >= k // 70)


# Each takes the tables by their names, so that one function serves the library and float64.
SCORES: dict[str, Any] = {
    "alibi": lambda s, b, h, q, k, t: s + t["slopes"][h] * (k - q) * 0.01,
    "soft cap": lambda s, b, h, q, k, t: 1.5 * torch.tanh(s / 1.5),
    "by distance": lambda s, b, h, q, k, t: s * 0.5 + t["distance"][h, q - k + SEQ_K],
    "dense bias": lambda s, b, h, q, k, t: s + t["bias"][0, 0, q, k],
    "nonlinear": lambda s, b, h, q, k, t: s * torch.sigmoid(t["few"][(q + k) % 5] * s) + t["few"][k % 5] ** 2,
    "hides": lambda s, b, h, q, k, t: torch.where(k <= q + 10, s + t["slopes"][h], -math.inf),
    "counts from the end": lambda s, b, h, q, k, t: s + t["few"][k % 5 - 5],
    "no score": lambda s, b, h, q, k, t: t["few"][k % 5] * 1.0 + t["slopes"][h] * 0.0,
}


class Case:
    """A call with functions of the user's, and both passes of the CPU backend."""

    def __init__(self, name: str, masked: bool, window=(None, None), softcap: float = 0.0) -> None:
        rule = SCORES[name]
        self.options = {"window": window, "softcap": softcap}
        make = lambda *shape: real(*shape).half()  # noqa: E731
        self.q, self.k, self.v = (
            make(BATCH, SEQ_Q, HEADS, D),
            *(make(BATCH, SEQ_K, HEADS_KV, D) for _ in "kv"),
        )
        self.do, self.dlse = make(BATCH, SEQ_Q, HEADS, D), real(BATCH, HEADS, SEQ_Q)
        self.rule, self.mask_mod = rule, mask if masked else None
        self.traced = trace(lambda s, b, h, q, k: rule(s, b, h, q, k, TABLES), self.mask_mod)

    def run(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        mods = BlockMods(self.traced, range(BATCH), range(HEADS), HEADS // HEADS_KV)
        out, lse = torch.empty_like(self.do), torch.empty(BATCH, HEADS, SEQ_Q)
        left, right = self.options["window"]
        common = {"left": left, "right": right, "softcap": self.options["softcap"], "mods": mods}
        cpu.attention(CONFIG, self.q, self.k, self.v, out, lse, D**-0.5, **common)
        like = {"dq": self.q, "dk": self.k, "dv": self.v}
        grads = {name: torch.full_like(x, math.nan) for name, x in like.items()}
        captured = {i: torch.zeros(t.shape, dtype=torch.float64) for i, t in enumerate(self.traced.tensors)}
        cpu_backward.backward(
            CONFIG, self.do, self.q, self.k, self.v, out, lse, self.dlse, D**-0.5,
            Gradients(**grads, captured=captured), **common,
        )  # fmt: skip
        names = {id(t): name for name, t in TABLES.items()}
        return grads, {names[id(self.traced.tensors[i])]: g for i, g in captured.items()}

    def expected(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        tables = {name: t.double().requires_grad_() for name, t in TABLES.items()}
        options = {
            **self.options, "mask_mod": self.mask_mod,
            "score_mod": lambda s, b, h, q, k: self.rule(s, b, h, q, k, tables),
        }  # fmt: skip
        found = reference_gradients(self.q, self.k, self.v, self.do, self.dlse, **options)
        out, lse = reference(self.q, self.k, self.v, **options)
        seen = lse != -math.inf
        loss = (out * self.do.double()).sum() + (lse[seen] * self.dlse.double()[seen]).sum()
        used = list(tables.values()) if loss.requires_grad else []
        of_tables = torch.autograd.grad(loss, used, allow_unused=True) if used else [None] * len(tables)
        named = dict(zip(tables, of_tables, strict=True))
        return {n: getattr(found, n) for n in ("dq", "dk", "dv")}, {
            n: g for n, g in named.items() if g is not None
        }


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_gradients(name: str, masked: bool) -> None:
    options = {"window": (50, 15), "softcap": 2.0} if name in ("by distance", "nonlinear") else {}
    case = Case(name, masked, **options)
    (grads, captured), (expected, of_tables) = case.run(), case.expected()
    for own, wanted in ((grads, expected), (captured, of_tables)):
        for key, gradient in own.items():
            scale = wanted[key].abs().max().item()
            assert scale > 0 or name == "no score", key
            torch.testing.assert_close(
                gradient.double(), wanted[key], rtol=4e-3, atol=4e-3 * max(scale, 1e-3)
            )
    assert set(captured) <= set(of_tables)
    assert captured or name == "soft cap"


def test_equal_calls_give_equal_bits() -> None:
    case = Case("nonlinear", True)
    first, second = case.run(), case.run()
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
