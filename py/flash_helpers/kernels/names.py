"""A kernel's name: the word of each configuration field, one writer and one parser for every family.

A name reads ``(sizes): words``, for example ``(FP16, 128, 64, 64, 4): async+eager+load_0_2_2_tiles``. The
metadata of a field says how the field stands in it: ``size``, ``flag``, ``number``, ``one_of`` or ``group``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Generic, TypeVar

from flash_helpers.kernels.cpp_names import config_in_cpp_name
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.field_types import field_types

Config = TypeVar("Config")
CONFIG_FIELDS: dict[type, dict[str, Any]] = {}
"""Each configuration class that is loaded, with the types of its fields. They are read where the class is
defined: no tracer follows the reading of annotations, and it takes longer than all checks of a call."""
CONFIG_DIRECTIONS: dict[type, str] = {}
"""Each of these classes with its direction, which is the name of its module's folder."""

_NAME = re.compile(r"\s*\((?P<sizes>[^()]*)\): *(?P<words>[^|]*?)(?: \| [\w+]+)?\s*", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class Size:
    """A number or the element type in parentheses; ``after`` a field it is written ``/N`` if they differ."""

    after: str = ""


@dataclass(frozen=True)
class Flag:
    """A word that is there when the field is true."""

    word: str


@dataclass(frozen=True)
class Number:
    """``stem_N``; a field with a default is named only when it differs from it."""

    stem: str


@dataclass(frozen=True)
class OneOf:
    """The word of an enumerator; an empty word is left out, a default is too."""

    words: Mapping[Any, str]


@dataclass(frozen=True)
class Group:
    """Several fields in one word, ``load_{}_{}_{}_tiles``; each of them carries an equal ``Group``."""

    form: str


Word = Flag | Number | OneOf | Group


def size(after: str = "") -> Any:
    """A field that stands in parentheses, see ``Size``."""
    return field(metadata={"name": Size(after)})


def flag(word: str, default: Any = MISSING) -> Any:
    """A boolean field, see ``Flag``."""
    return field(default=default, metadata={"name": Flag(word)})


def number(stem: str, default: Any = MISSING) -> Any:
    """An integer field, see ``Number``."""
    return field(default=default, metadata={"name": Number(stem)})


def one_of(words: Mapping[Any, str], default: Any = MISSING) -> Any:
    """A field of an enumeration, see ``OneOf``."""
    return field(default=default, metadata={"name": OneOf(words)})


def group(form: str) -> Any:
    """One of the integer fields that share a word, see ``Group``."""
    return field(metadata={"name": Group(form)})


@dataclass(frozen=True)
class Name(Generic[Config]):
    """How the kernels of one family and direction are named.

    Attributes:
        config: the configuration dataclass; each field says in its metadata how it stands in a name.
        kind: what such a name names, in an error: ``Hopper kernel``.
        example: a name, for errors.
        lead: words that each name begins with.
        derived: further sizes: property of the configuration to its form, ``{}wg``.
    """

    config: type[Config]
    kind: str
    example: str
    lead: tuple[str, ...] = ()
    derived: tuple[tuple[str, str], ...] = ()
    # Not cached when first asked for: who compiles a call meets no lock then.
    _named: tuple[tuple[Field[Any], Any], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        named = tuple((f, f.metadata["name"]) for f in fields(self.config))  # type: ignore[arg-type]
        object.__setattr__(self, "_named", named)
        CONFIG_FIELDS[self.config] = field_types(self.config)
        CONFIG_DIRECTIONS[self.config] = self.config.__module__.split(".")[-2]

    # ------------------------------------------------------------------ writing
    def write(self, config: Config, include_d_head: bool = True, include_tup: bool = True) -> str:
        """The name of a configuration.

        Args:
            config: the configuration.
            include_d_head: show the head sizes.
            include_tup: show the sizes at all.
        """
        words = "+".join([*self.lead, *self._words(config)])
        if not include_tup:
            return words
        sizes = []
        for f, kind in self._fields(Size):
            value = getattr(config, f.name)
            if f.name.startswith("d_head") and not include_d_head:
                continue
            if not kind.after:
                sizes.append(value.name if isinstance(value, DType) else str(value))
            elif value != getattr(config, kind.after):
                sizes[-1] += f"/{value}"
        sizes += [form.format(getattr(config, name)) for name, form in self.derived]
        return f"({', '.join(sizes)}): {words}"

    def _words(self, config: Config) -> Iterator[str]:
        written = set()
        for f, kind in self._fields(Flag, Number, OneOf, Group):
            value = getattr(config, f.name)
            if isinstance(kind, Group):
                if kind not in written:
                    yield kind.form.format(*(getattr(config, g.name) for g in self._group(kind)))
                written.add(kind)
            elif f.default is not MISSING and value == f.default:
                continue
            elif isinstance(kind, Flag) and value:
                yield kind.word
            elif isinstance(kind, Number):
                yield f"{kind.stem}_{value}"
            elif isinstance(kind, OneOf) and kind.words[value]:
                yield kind.words[value]

    def _fields(self, *kinds: type) -> list[tuple[Field[Any], Any]]:
        return [(f, kind) for f, kind in self._named if isinstance(kind, kinds)]

    def _group(self, group: Group) -> list[Field[Any]]:
        return [f for f, kind in self._fields(Group) if kind == group]

    # ------------------------------------------------------------------ reading
    def claims(self, text: str) -> int:
        """How surely a text names such a kernel, well-formed or not; 0: nothing says so."""
        match = _NAME.fullmatch(text)
        words = match["words"].split("+") if match else []
        said = sum(word in words for word in self.lead)
        said += any(f"{form.partition('{}')[2]}):" in text for _, form in self.derived)
        return said + (1 + len(self.lead) + len(self.derived)) * (self.config.__name__ in text)

    def read(self, text: str) -> Config:
        """The configuration that a name states, with its words in any order.

        Args:
            text: a short form with its sizes, of a configuration or of a kernel (`` | causal`` behind it); or
                a C++ name that holds the configuration struct: demangled (as cuobjdump and profilers print
                it, or as ``to_cpp_struct()`` writes it) or mangled.

        Raises:
            ValueError: the text holds no configuration; says which part or word is wrong.
        """
        try:
            config = config_in_cpp_name(self.config, text)
            return self._of_short_form(text) if config is None else config
        except ValueError as error:
            raise ValueError(
                f"{text!r} names no {self.kind} configuration: {error}. Expected a short form such as "
                f"{self.example!r} or a C++ name holding {self.config.__name__}{{...}}"
            ) from error

    def _of_short_form(self, text: str) -> Config:
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"it has not the form {self._form()}")
        values = self._sizes([part.strip() for part in match["sizes"].split(",")])
        words = match["words"].split("+")
        for word in words:
            if not re.fullmatch(r"\w+", word, re.ASCII):
                raise ValueError(f"{word!r} is no word; words are joined by + without spaces")
            if words.count(word) > 1:
                raise ValueError(f"the word {word!r} is said twice")
        rest = [word for word in words if word not in self.lead]
        for _, kind in self._fields(Flag, Number, OneOf, Group):
            rest = [word for word in rest if not _is_of(kind, word)]
        if rest:
            raise ValueError(f"the word {rest[0]!r} is unknown; allowed: {', '.join(self._allowed())}")
        for f, kind in self._fields(Flag, Number, OneOf, Group):
            self._take(f, kind, words, values)
        derived = {name: values.pop(name) for name, _ in self.derived}
        config = self.config(**values)
        for name, form in self.derived:
            if getattr(config, name) != derived[name]:
                raise ValueError(f"{form.format(derived[name])} does not go with the other sizes")
        meant = self.write(config, include_tup=False).split("+")
        for word in words:  # a word for what holds without it, such as kv_stages_1
            if word not in meant:
                raise ValueError(f"the word {word!r} says what holds without it: leave it out")
        if missing := [word for word in meant if word not in words]:
            raise ValueError(f"the word {missing[0]!r} is missing")
        return config

    def _form(self) -> str:
        return f"({', '.join(name for name, _ in self._size_parts())}): words joined by +"

    def _size_parts(self) -> list[tuple[str, str]]:
        """What stands in parentheses: names and expressions."""
        parts: list[tuple[str, str]] = []
        for f, kind in self._fields(Size):
            if kind.after:
                name, pattern = parts[-1]
                parts[-1] = (f"{name}[/{f.name}]", rf"{pattern}(?:/(\d+))?")
            else:
                parts.append((f.name, r"(\w+)" if f.name == "dtype" else r"(\d+)"))
        return parts + [
            (form.format("N"), re.escape(form).replace(r"\{\}", r"(\d+)")) for _, form in self.derived
        ]

    def _sizes(self, given: Sequence[str]) -> dict[str, Any]:
        parts = self._size_parts()
        if len(given) != len(parts):
            raise ValueError(f"({', '.join(given)}) has {len(given)} parts; the form is {self._form()}")
        found: list[str | None] = []
        for (name, pattern), text in zip(parts, given, strict=True):
            match = re.fullmatch(pattern, text, re.ASCII)
            if match is None:
                raise ValueError(f"{name} is {text!r}; the form is {self._form()}")
            found += match.groups()
        names = [f.name for f, _ in self._fields(Size)] + [name for name, _ in self.derived]
        values: dict[str, Any] = dict(zip(names, found, strict=True))
        for f, kind in self._fields(Size):
            if kind.after and values[f.name] is None:
                values[f.name] = values[kind.after]
        return {n: DType.from_string(v) if n == "dtype" else int(v) for n, v in values.items()}

    def _take(self, f: Field[Any], kind: Word, words: Sequence[str], values: dict[str, Any]) -> None:
        """The value of one field by the words."""
        said = [word for word in words if _is_of(kind, word)]
        if len(said) > 1:
            raise ValueError(f"{' and '.join(said)} contradict each other: say one")
        if isinstance(kind, Flag):
            values[f.name] = bool(said)
        elif not said and f.default is not MISSING:
            values[f.name] = f.default
        elif isinstance(kind, OneOf):
            by_word = {word: key for key, word in kind.words.items()}
            if not said and "" not in by_word:
                raise ValueError(f"exactly one of {', '.join(by_word)} must be said")
            values[f.name] = by_word[said[0] if said else ""]
        elif not said:
            raise ValueError(f"the word {_shown(kind)} is missing")
        else:
            numbers = re.fullmatch(_pattern(kind), said[0], re.ASCII)
            assert numbers is not None  # _is_of matched it
            at = self._group(kind).index(f) if isinstance(kind, Group) else 0
            values[f.name] = int(numbers[at + 1])

    def _allowed(self) -> list[str]:
        words: list[str] = [*self.lead]
        for _, kind in self._fields(Flag, Number, OneOf, Group):
            if isinstance(kind, OneOf):
                words += [word for word in kind.words.values() if word]
            elif _shown(kind) not in words:
                words.append(_shown(kind))
        return words


def is_config(value: object, direction: str | None = None) -> bool:
    """Whether a value is a configuration of a direction, by its folder's name; None: of any."""
    named = CONFIG_DIRECTIONS.get(type(value))
    return named is not None and direction in (None, named)


def _pattern(kind: Number | Group) -> str:
    form = f"{kind.stem}_{{}}" if isinstance(kind, Number) else kind.form
    return re.escape(form).replace(r"\{\}", r"(0|[1-9]\d*)")


def _is_of(kind: Word, word: str) -> bool:
    if isinstance(kind, Flag):
        return word == kind.word
    if isinstance(kind, OneOf):
        return bool(word) and word in kind.words.values()
    return re.fullmatch(_pattern(kind), word, re.ASCII) is not None


def _shown(kind: Flag | Number | Group) -> str:
    if isinstance(kind, Flag):
        return kind.word
    return f"{kind.stem}_N" if isinstance(kind, Number) else kind.form.format("Q", "K", "V")
