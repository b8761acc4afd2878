"""Functions that were recorded before: found again by what they are, without calling them.

A call of ``attention`` is remembered by its mod as by its other options (``run.launch_cache``); so the mod
has to be known before the call's launch is looked up, in a microsecond or two.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flash_attention.mods.guards import Guard, UnguardedError, facts, guards_of
from flash_attention.mods.symbols import Symbol
from flash_attention.mods.tracing import Traced, trace
from flash_helpers.mods.mask_inputs import mask_inputs, needs_bits
from flash_helpers.mods.mod import Mod

KEPT = 256  # pairs of functions, by their code
OF_A_PAIR = 128  # sets of captured values of each, such as those of a model's layers
TOKENS_KEPT = 4096
MAX_TENSORS = 8  # captured ones that a remembered launch compares (binding/given_call.hpp)

Functions = tuple[Callable[..., Any] | None, Callable[..., Any] | None]
_numbers = itertools.count(1)
_tokens: dict[Any, int] = {}
# What says of a tensor what it is without reading its values.
_FACTS = frozenset(
    (
        Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.ndim.__get__, Tensor.size,  # type: ignore[attr-defined]
        Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.requires_grad.__get__, Tensor.is_complex,  # type: ignore[attr-defined]
        Tensor.layout.__get__, Tensor.is_nested.__get__, Tensor.is_neg, Tensor.is_conj, Tensor.stride,  # type: ignore[attr-defined]
        Tensor.data_ptr, torch.device,
    )
)  # fmt: skip
# Of these a remembered launch compares nothing.
_UNCOMPARED = frozenset((Tensor.data_ptr, Tensor.requires_grad.__get__))  # type: ignore[attr-defined]


class Known:
    """A recorded pair of functions.

    Attributes:
        match: asks whether two functions are these, and whether what they captured lives. Gives None, or
            ``key``, what a remembered launch compares behind its other arguments, and ``bare``. Compared are
            the captured tensors, and before them the places of those of which it keeps bits; None: they are
            more than it can compare. Shapes, strides and types of the mod's tensors are not looked at: a
            remembered launch compares them, and ``traced`` does.
        following: a weak reference to the pair that was asked for after this one; None: nobody knows.
        bare: what they compute and the numbers that they captured, without the tensors.
        key: stands for them in the key of a remembered call. It is equal where mod and numbers are, for
            launches compare captured tensors; but not where a launch keeps bits found from some.
    """

    __slots__ = ("__weakref__", "_facts", "_tensors", "bare", "following", "key", "match")

    def __init__(self, guards: tuple[Guard | None, Guard | None], traced: Traced) -> None:
        self.bare = traced.with_tensors(())
        # The captured tensors that bits of tiles are found from (``backends.cuda_tiles``), if there are bits.
        read = mask_inputs(traced.mod).tensors if needs_bits(traced.mod) else None
        contents = () if read is None else (read,)
        # A tensor's version counts while it lives: another one may come to lie where it lay.
        self.key = ("mods", next(_numbers) if read else _token(self.bare))
        self._tensors = tuple(weakref.ref(x) for x in traced.tensors)
        self._facts = tuple(facts(x) for x in traced.tensors)
        compared = self._tensors if len(self._tensors) <= MAX_TENSORS else None
        self.following: weakref.ref[Known] | None = None
        self.match = _binding().KnownFunctions(*guards, self.key, contents, compared, self.bare).match

    @property
    def mod(self) -> Mod:
        return self.bare.mod

    @property
    def traced(self) -> Traced | None:
        """The mod with what it captured; None: a tensor is gone, or is another than it was."""
        tensors = []
        for reference, about in zip(self._tensors, self._facts, strict=True):
            x = reference()
            if x is None or facts(x) != about:
                return None
            tensors.append(x)
        return self.bare.with_tensors(tuple(tensors))

    def forget(self) -> None:
        """Matches nothing any more."""
        self.match = lambda score_mod, mask_mod: None

    def is_gone(self) -> bool:
        """Whether a captured tensor is, so that nothing matches any more."""
        return any(reference() is None for reference in self._tensors)


def _binding() -> Any:
    """The extension, which compares. It knows neither devices nor kernels until it is told of some."""
    import flash_attention_kernels

    return flash_attention_kernels


class _Pairs(list[Known]):
    """What was recorded of two pieces of code with different captured values.

    Attributes:
        latest: what was found last; None: nothing was.
    """

    latest: Known | None = None

    def find(self, score_mod: Any, mask_mod: Any) -> Known | None:
        """Looks at those behind the latest first: layers of a model call one after the other."""
        entries, latest = [*self], self.latest  # another thread may find another one meanwhile
        at = entries.index(latest) + 1 if latest in entries else 0
        for entry in (*entries[at:], *entries[:at]):
            if entry.match(score_mod, mask_mod) is not None:
                self.latest = entry
                return entry
        return None

    def drop(self, entry: Known) -> None:
        self[:] = [other for other in self if other is not entry]
        if self.latest is entry:
            self.latest = None

    def add(self, entry: Known) -> None:
        self[:] = [other for other in self if not other.is_gone()][-OF_A_PAIR + 1 :]
        self.append(entry)


def _token(bare: Traced) -> int:
    """A number that stands for a mod with its numbers in this process."""
    numbers = tuple((type(x), x.hex() if isinstance(x, float) else x) for x in bare.numbers)
    if len(_tokens) >= TOKENS_KEPT:  # no number is given out again
        _tokens.clear()
    return _tokens.setdefault((bare.mod, numbers), next(_numbers))


class _Known(dict[tuple[Any, Any], _Pairs]):
    """What was recorded, by the functions' code.

    Attributes:
        latest: what was found last; None: nothing was.
    """

    latest: Known | None = None

    def clear(self) -> None:
        self.latest = None
        super().clear()


_known = _Known()


def matched(score_mod: Any, mask_mod: Any) -> tuple[Any, Any, Traced] | None:
    """What ``Known.match`` says of two functions. None: they were not recorded, or are not as they were.

    What was asked for last is asked first, then what came after it the time before: the layers of a model
    call one after the other, and looking a function up by its code takes longer.
    """
    latest = _known.latest
    if latest is not None:
        found = latest.match(score_mod, mask_mod)
        if found is not None:
            return found  # type: ignore[no-any-return]
        if latest.following is not None:
            following = latest.following()
            if following is not None:
                found = following.match(score_mod, mask_mod)
                if found is not None:
                    _known.latest = following
                    return found  # type: ignore[no-any-return]
    entry = known(score_mod, mask_mod)
    if entry is None:
        return None
    if latest is not None:
        latest.following = weakref.ref(entry)
    _known.latest = entry
    return entry.match(score_mod, mask_mod)  # type: ignore[no-any-return]


def known(score_mod: Any, mask_mod: Any) -> Known | None:
    """What was recorded of two functions; None: nothing, or they are not as they were."""
    entries = _known.get((_code(score_mod), _code(mask_mod)))
    if entries is None:
        return None
    latest = entries.latest
    if latest is not None and latest.match(score_mod, mask_mod) is not None:
        return latest
    return entries.find(score_mod, mask_mod)


def recorded(score_mod: Any, mask_mod: Any, device: torch.device) -> Traced:
    """``trace``, or what it gave for the same functions before.

    Raises:
        as ``trace``.
    """
    entry = known(score_mod, mask_mod)
    if entry is not None:
        traced = entry.traced
        if traced is not None and all(x.device == device for x in traced.tensors):
            return traced
        entries = _known.get((_code(score_mod), _code(mask_mod)))
        if traced is None and entries is not None:
            entries.drop(entry)
            entry.forget()
    with _values_unread() as unread:
        traced = trace(score_mod, mask_mod, device)
    if unread.holds and not traced.reads_values:
        _remember(score_mod, mask_mod, traced, asks_where=unread.asks_where)
    return traced


def _remember(score_mod: Any, mask_mod: Any, traced: Traced, *, asks_where: bool) -> None:
    try:
        guards = guards_of((score_mod, mask_mod), traced.tensors, asks_where=asks_where)
        entry = Known(guards, traced)  # type: ignore[arg-type]
    except (UnguardedError, ImportError):  # without the extension each call records them anew
        return
    if len(_known) >= KEPT:
        _known.clear()
    _known.setdefault((_code(score_mod), _code(mask_mod)), _Pairs()).add(entry)


def _code(function: Any) -> Any:
    """What a function is looked up by."""
    if type(function) is functools.partial:
        return (functools.partial, _code(function.func))
    return None if function is None else getattr(function, "__code__", None)


# ---------------------------------------------------------------------- what a recording must not depend on
class _Unread(TorchFunctionMode):
    """Sees whether a function computes with tensors themselves: what it then captures is another tensor in
    each call, or what was in one.

    Attributes:
        holds: it has not.
        asks_where: it has asked what no launch compares: an address, or whether a gradient is required.
    """

    def __init__(self) -> None:
        super().__init__()
        self.holds, self.asks_where = True, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _UNCOMPARED:
            self.asks_where = True
        if function not in _FACTS and not _has_symbol((*args, *kwargs.values())):
            self.holds = False
        return function(*args, **kwargs)


def _has_symbol(values: Any) -> bool:
    return any(isinstance(x, Symbol) or (isinstance(x, tuple | list) and _has_symbol(x)) for x in values)


@contextmanager
def _values_unread() -> Iterator[_Unread]:
    with _Unread() as mode:
        yield mode
