"""No shell sees a path: nvcc hands its steps to one, so it is given none."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
from pathlib import Path

import pytest
from fake_nvcc import FakeNvcc
from small_root import make_small_root

from flash_helpers import messages
from flash_helpers.build import KernelCache, build_kernels, find_library
from flash_helpers.build import compile as compile_module
from flash_helpers.build import nvcc as nvcc_module
from flash_helpers.build import workplace as workplace_module
from flash_helpers.build.workplace import NoPlainFolderError, is_plain, workplace
from flash_helpers.kernel_configs import ForwardKernel

NAMES = (
    "a$(touch PWNED)b", "a`touch PWNED`b", "with space", "quote'q", 'double"q', "back\\slash", "com,ma",
    "se;mi", "new\nline", "ünïcødé", "$HOME", "&amp", "|touch PWNED", "-o", "a=b", "*", "(x)", "#", "\udcff",
)  # fmt: skip
EVERYTHING = "a$(touch PWNED)`touch PWNED` '\"\\,;\n&|*ü$HOME"

# What nvcc does: its arguments, and the real path of its source, become text of a shell's command.
SHELL = """
for word in "$@"; do case "$word" in *.cu|*.cpp) source=$word;; esac; done
eval "true \\"$(realpath "$source")\\" \\"$PWD\\" \\"$TMPDIR\\"" || exit 3
for word in "$@"; do eval "true \\"$word\\"" || exit 3; done
cat include/ampere/inner.cuh > /dev/null || exit 4
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A folder with a bad name that everything lies in: cache, headers, temporary files, home, and we."""
    place = tmp_path / request.param
    place.mkdir()
    for name in ("home", "temporary"):
        (place / name).mkdir()
    monkeypatch.setenv("HOME", str(place / "home"))
    monkeypatch.setenv("TMPDIR", str(place / "temporary"))
    monkeypatch.setattr(workplace_module.tempfile, "tempdir", str(place / "temporary"))
    monkeypatch.chdir(place)
    return place


def ran(folder: Path) -> list[Path]:
    return list(folder.rglob("PWNED*"))


@pytest.mark.parametrize("places", NAMES, indirect=True)
def test_paths_are_names_and_nothing_else(
    places: Path, tmp_path: Path, kernel: ForwardKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeNvcc(tmp_path / "toolkit", SHELL)
    monkeypatch.setattr(compile_module, "find_nvcc", lambda: fake.nvcc)
    root, cache = make_small_root(places / "include"), KernelCache(places / "cache")
    (result,) = build_kernels([kernel], [80], cache=cache, include_root=root)
    assert result.path.read_text() == "half whole"
    assert find_library(cache, kernel, 80, root) == result.path
    assert ran(tmp_path) == []


@pytest.mark.compile
@pytest.mark.parametrize("places", ["a$(touch PWNED)b", EVERYTHING], indirect=True)
def test_the_real_compiler_builds_where_paths_are_commands(
    places: Path, tmp_path: Path, kernel: ForwardKernel
) -> None:
    root, cache = make_small_root(places / "include"), KernelCache(places / "cache")
    (result,) = build_kernels([kernel], [80], cache=cache, include_root=root)
    assert result.path.read_bytes()[:4] == b"\x7fELF"
    assert ran(tmp_path) == []


def test_libraries_are_loaded_whatever_their_path(tmp_path: Path) -> None:
    """$ORIGIN and its like mean something to the loader, too."""
    from flash_attention.backends import cuda_kernels

    library = ctypes.util.find_library("z") or "libz.so.1"
    source = next(Path(place) for place in _mapped(library))
    for name in ("$ORIGIN", "$LIB", "\udcff", "plain"):
        (tmp_path / name).mkdir()
        shutil.copy(source, tmp_path / name / "library.so")
        with pytest.raises(RuntimeError, match="no kernel library: it does not export"):
            cuda_kernels.load_library(tmp_path / name / "library.so")


def test_a_library_that_is_gone_or_of_another_version_is_as_good_as_none(
    tmp_path: Path, kernel: ForwardKernel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flash_attention.backends import cuda_kernels

    monkeypatch.setattr(messages, "_said", set())
    monkeypatch.setattr(cuda_kernels.build, "find_library", lambda *_: tmp_path / "gone.so")
    for _ in range(2):
        assert cuda_kernels.load_kernel(kernel, 80) is None
    assert capsys.readouterr().err.count("a kernel library is not used: cannot load") == 1


def _mapped(library: str) -> list[str]:
    ctypes.CDLL(library)
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [
        line.split()[-1] for line in lines if Path(line.split()[-1]).name.startswith(library.split(".so")[0])
    ]


def test_where_no_folder_will_do_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "a b"
    bad.mkdir()
    monkeypatch.setattr(workplace_module.tempfile, "tempdir", str(bad))
    monkeypatch.setattr(workplace_module, "_USUAL_FOLDERS", (str(tmp_path / "none"),))
    with pytest.raises(NoPlainFolderError, match="Set TMPDIR to such a folder"), workplace(bad, {}):
        pass
    assert is_plain(Path("/tmp/a_b-c.d"))
    (tmp_path / "plain").symlink_to(bad)
    assert not is_plain(tmp_path / "plain")


@pytest.mark.parametrize("name", ["a$b", "a`b", 'a"b', "a\\b", "a\nb"])
def test_a_compiler_whose_path_can_not_be_said_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    program = tmp_path / name / "bin" / "nvcc"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho 'release 13.0, V13.0.88'\n")
    program.chmod(0o755)
    monkeypatch.setattr(nvcc_module, "candidates", lambda name: iter([program]))
    with pytest.raises(nvcc_module.CompilerNotFoundError, match="which nvcc can't take"):
        nvcc_module.find_nvcc()
