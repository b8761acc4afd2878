"""C++ headers made of the dataclasses: what stands in them, when they are written, what is refused."""

import dataclasses
import os
import re
import subprocess
from enum import IntEnum

import pytest

from flash_helpers.build import SourcesNotFoundError, sources
from flash_helpers.build.sources import include_root
from flash_helpers.kernel_configs import BackwardTraits, ForwardTraits
from flash_helpers.kernels import cpp_headers
from flash_helpers.kernels.families import DIRECTIONS
from flash_helpers.kernels.launch_features import Features
from flash_helpers.kernels.names import flag, number, one_of, size

SAMPLES = {int: 1, bool: True}
STRUCTS = [*(direction.config for direction in DIRECTIONS), ForwardTraits, BackwardTraits]


class Order(IntEnum):
    UP = 3
    DOWN = -4


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    rows: int = size()
    order: Order = one_of({Order.UP: "up", Order.DOWN: "down"}, Order.DOWN)
    fast: bool = flag("fast", True)
    stages: int = number("stages", 2)


TOY = """
#include "toy.cuh"
constexpr ToyConfig toy{.rows = 7};
static_assert(toy.rows == 7 && toy.order == Order::DOWN && toy.fast && toy.stages == 2);
static_assert(int(Order::UP) == 3 && int(Order::DOWN) == -4);
static_assert(toy < ToyConfig{8, Order::DOWN, true, 2} && toy == ToyConfig{7, Order::DOWN, true, 2});
"""


def compiles(text, folder):
    (folder / "source.cpp").write_text(text)
    command = ["g++", "-std=c++20", "-fsyntax-only", "-I", folder, "-I", sources.include_root()]
    run = subprocess.run([*command, folder / "source.cpp"], capture_output=True, text=True, check=False)
    return run.returncode == 0, run.stderr


@pytest.mark.compile
def test_a_struct_has_the_fields_types_and_defaults_of_its_dataclass(tmp_path):
    (tmp_path / "toy.cuh").write_text(cpp_headers.structs_header([ToyConfig]))
    assert compiles(TOY, tmp_path) == (True, "")
    good, errors = compiles(TOY.replace("toy.stages == 2", "toy.stages == 3"), tmp_path)
    assert not good
    assert "static assertion failed" in errors


@pytest.mark.compile
@pytest.mark.parametrize("struct", STRUCTS)
def test_every_enumerator_and_default_is_the_dataclass_own(struct, tmp_path):
    types, name = cpp_headers.field_types(struct), struct.__name__
    checks = [
        f"std::is_same_v<decltype({name}::{field}), {'int' if kind is int else kind.__name__}>"
        for field, kind in types.items()
    ]
    for kind in cpp_headers.enumerations([struct]):
        checks += [f"int({kind.__name__}::{member.name}) == {int(member)}" for member in kind]
    needed = [f.name for f in dataclasses.fields(struct) if f.default is dataclasses.MISSING]
    samples = {field: SAMPLES.get(types[field]) or next(iter(types[field])) for field in needed}
    value = struct(**samples)
    whole = value.to_cpp_struct()
    least = ", ".join(re.findall(rf"\.(?:{'|'.join(needed)}) = [\w:]+", whole)) if needed else ""
    checks.append(f"{name}{{{least}}} == {whole}")
    asserts = "".join(f"static_assert({check});\n" for check in checks)
    text = f'#include <type_traits>\n#include "flash_attention.cuh"\n{asserts}'
    assert compiles(text, tmp_path) == (True, "")


def test_the_digest_sees_every_change():
    def digest(*structs):
        return cpp_headers.structs_header(structs).split("kStructsDigest = ")[1].split(";")[0]

    def toy(*fields):
        return dataclasses.make_dataclass("ToyConfig", fields)

    rows, fast = ("rows", int), ("fast", bool, False)
    seen = [
        digest(toy(rows, fast)),
        digest(toy(rows)),
        digest(toy(rows, ("fast", bool, True))),
        digest(toy(rows, ("quick", bool, False))),
        digest(toy(rows, ("fast", int, 0))),
        digest(toy(("fast", bool), ("rows", int))),
        digest(toy(rows, ("fast", Order, Order.UP))),
    ]
    assert len(set(seen)) == len(seen)
    assert digest(toy(rows, fast)) == seen[0]


@pytest.mark.parametrize("kind", [float, str, "tuple[int, ...]", IntEnum | None])
def test_a_type_that_no_kernel_takes_is_refused_by_name(kind):
    toy = dataclasses.make_dataclass("ToyConfig", [("rows", int), ("wrong", kind)])
    with pytest.raises(TypeError, match=r"ToyConfig\.wrong is declared as .*; kernels take bool"):
        cpp_headers.structs_header([toy])


# ---------------------------------------------------------------- files
def test_headers_are_written_only_where_they_differ(tmp_path):
    names = {cpp_headers.STRUCTS, cpp_headers.FIELDS, cpp_headers.FEATURES}
    assert {path.name for path in cpp_headers.write_headers(tmp_path)} == names
    folder = tmp_path / cpp_headers.FOLDER
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    assert cpp_headers.write_headers(tmp_path) == []
    assert {path.stat().st_mtime for path in folder.iterdir()} == {1}
    (folder / cpp_headers.FIELDS).write_text("older")
    assert cpp_headers.write_headers(tmp_path) == [folder / cpp_headers.FIELDS]
    assert {path.name for path in folder.iterdir()} == names  # and nothing half written


def test_a_checkout_has_the_headers_of_its_dataclasses():
    folder = sources.include_root() / cpp_headers.FOLDER
    assert {path.name: path.read_text() for path in folder.iterdir()} == cpp_headers.headers()


def test_headers_that_cannot_be_written_are_said(tmp_path, monkeypatch):
    (tmp_path / "flash_attention.cuh").write_text("")
    (tmp_path / cpp_headers.FOLDER).write_text("a file in the folder's place")
    monkeypatch.setattr(sources, "_CANDIDATES", (tmp_path,))
    with pytest.raises(SourcesNotFoundError, match=r"not those of this version.*make the folder"):
        sources.include_root()


def test_nothing_differs_so_a_read_only_folder_will_do(tmp_path, monkeypatch):
    (tmp_path / "flash_attention.cuh").write_text("")
    cpp_headers.write_headers(tmp_path)
    monkeypatch.setattr(cpp_headers.Path, "write_text", lambda *a, **k: pytest.fail("written"))
    monkeypatch.setattr(sources, "_CANDIDATES", (tmp_path,))
    assert sources.include_root() == tmp_path


def test_every_feature_of_a_launch_is_read_into_its_member():
    """The binding's reader and the struct, from the one list."""
    text = cpp_headers.features_header()
    members = re.findall(r"read\(\"(\w+)\", problem\.(\w+)\);", text)
    assert [name for name, _ in members] == [member for _, member in members] == list(Features._fields)
    assert f"kFeatureCount = {len(Features._fields)};" in text
    assert f"({', '.join(Features._fields)})" in text
    problem = (include_root() / "flash_attention.cuh").read_text()
    struct = problem[problem.index("struct ForwardProblem") : problem.index("// Resources of a compiled")]
    assert all(re.search(rf"\b{name}\b[,;]", struct) for name in Features._fields)
