"""Headers and environment: what a build reads."""

from pathlib import Path

import pytest

from flash_helpers import environment
from flash_helpers.build import SourcesNotFoundError, sources


def test_include_root_has_the_headers():
    assert (sources.include_root() / "flash_attention.cuh").is_file()


def test_include_root_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "_CANDIDATES", (tmp_path / "a", tmp_path / "b"))
    with pytest.raises(SourcesNotFoundError, match=r"looked in .*a, .*b.*install the package again"):
        sources.include_root()


def test_headers_are_found_transitively(small_root):
    names = {
        str(path.relative_to(small_root))
        for path in sources.headers_of("ampere/forward/launcher.cuh", small_root)
    }
    assert names == {
        "ampere/forward/launcher.cuh",
        "ampere/inner.cuh",
        "flash_attention.cuh",
        "generated/structs.cuh",
        "mod_arguments.cuh",
    }


def test_digest_follows_every_header_and_not_the_place(small_root, tmp_path):
    header = "ampere/forward/launcher.cuh"
    before = sources.digest_of_headers(header, small_root)
    inner = small_root / "ampere" / "inner.cuh"
    inner.write_text(inner.read_text() + "// more\n")
    after = sources.digest_of_headers(header, small_root)
    assert before != after
    (small_root / "ampere" / "unrelated.cuh").write_text("int x;")
    assert sources.digest_of_headers(header, small_root) == after
    moved = small_root.rename(tmp_path / "elsewhere")
    assert sources.digest_of_headers(header, moved) == after


def test_circular_includes_end(tmp_path):
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#include "a.cuh"\n#include "cuda_of_the_toolkit.h"\n')
    assert len(sources.headers_of("a.cuh", tmp_path)) == 2


@pytest.mark.parametrize(
    ("value", "expected"), [("", True), ("1", True), ("on", True), ("0", False), ("False", False)]
)
def test_jit_enabled(monkeypatch, value, expected):
    monkeypatch.setenv("FLASH_ATTENTION_JIT", value)
    assert environment.jit_enabled() is expected


def test_jit_is_on_by_default(monkeypatch):
    monkeypatch.delenv("FLASH_ATTENTION_JIT", raising=False)
    assert environment.jit_enabled() is True


def test_variables_refuse_nonsense(monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_JIT", "maybe")
    with pytest.raises(ValueError, match="FLASH_ATTENTION_JIT is 'maybe'; allowed"):
        environment.jit_enabled()
    for value in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv("FLASH_ATTENTION_JOBS", value)
        with pytest.raises(ValueError, match=r"FLASH_ATTENTION_JOBS is .*; allowed: an integer from 1 on"):
            environment.jobs()


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path))
    assert environment.cache_dir() == tmp_path
    monkeypatch.delenv("FLASH_ATTENTION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert environment.cache_dir() == tmp_path / "xdg" / "flash_attention_kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert environment.cache_dir() == tmp_path / "home" / ".cache" / "flash_attention_kernels"


def test_every_variable_that_is_read_is_listed():
    text = Path(environment.__file__).read_text()
    listed = {variable.name for variable in environment.VARIABLES}
    for name in listed:
        assert f'environ.get("{name}"' in text
    others = {"XDG_CACHE_HOME", "PATH", "CUDA_VISIBLE_DEVICES"}
    assert {part.split('"')[0] for part in text.split('environ.get("')[1:]} == listed | others
