"""Tensors made while a function is recorded, of random numbers or values: users mean one for each score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flash_attention.mods.refusal import refused
from flash_attention.mods.symbols import Symbol

_OF_TORCH = (
    *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"),
    *("bernoulli", "multinomial", "normal", "poisson", "dropout"),
)
_OF_TENSORS = (
    *("bernoulli", "bernoulli_", "multinomial", "normal_", "uniform_", "random_"),
    *("exponential_", "cauchy_", "geometric_", "log_normal_"),
)
_OF_LAYERS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_DRAWS = frozenset(
    getattr(owner, name)
    for owner, names in ((torch, _OF_TORCH), (Tensor, _OF_TENSORS), (functional, _OF_LAYERS))
    for name in names
)


_OF_DATA = frozenset((torch.tensor, torch.as_tensor, torch.asarray))


class NoDraws(TorchFunctionMode):
    """Refuses what draws random numbers, and names what draws one for each score; tensors of a value; and
    looking for one in a tensor, which PyTorch refuses without a word for users."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _OF_DATA and args and isinstance(args[0], Symbol):
            raise refused(
                f"{function.__name__} makes a tensor of a value that differs from score to score",
                "Compute with the value itself: it takes part in operations as a tensor does",
            )
        if function is Tensor.__contains__ and isinstance(args[1], Symbol):
            raise refused(
                "`in` looks for a value in a captured tensor",
                "Write torch.isin(value, row), or (row == value).any(-1)",
            )
        if function in _DRAWS:
            raise refused(
                f"{function.__name__} draws once for the whole call, not for each score",
                "Take flash_attention.mods.random(seed, b, h, q_idx, kv_idx), or draw a tensor before the "
                "call and index it",
            )
        return function(*args, **(kwargs or {}))
