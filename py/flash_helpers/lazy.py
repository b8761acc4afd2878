"""What is loaded on its first use, so that an import takes no longer than what it is needed for.

``lazy_names`` is for a package that offers the names of its modules, ``LazySequence`` for a list whose items
come from modules.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import TypeVar, overload

Item = TypeVar("Item")


def lazy_names(
    package: str, modules: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The functions ``__getattr__`` and ``__dir__`` of a package that offers the names of its modules.

    The first one imports the module of a name that is asked for. Type checkers read the same names from
    imports under ``if TYPE_CHECKING``.

    Args:
        package: the package's ``__name__``.
        modules: absolute name of a module to the names that the package offers from it; the last part of the
            module's own name offers the module.
    """
    home = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> object:
        module = home.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        loaded = import_module(module)
        return loaded if module == f"{package}.{name}" else getattr(loaded, name)

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return find, listed


class LazySequence(Sequence[Item]):
    """A tuple that is made when one of its items or its length is first asked for.

    Args:
        make: gives the items.
    """

    def __init__(self, make: Callable[[], Iterable[Item]]) -> None:
        self._make = make

    @cached_property
    def _items(self) -> tuple[Item, ...]:
        return tuple(self._make())

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)
