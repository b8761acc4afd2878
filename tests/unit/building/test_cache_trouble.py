"""A full disk, a cache that is removed meanwhile, and damage: each is healed or said with what to do."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nvcc import FakeNvcc
from typer.testing import CliRunner

from flash_helpers.build import (
    BuildError,
    KernelCache,
    build_kernels,
    build_library,
    built_kernels,
    find_library,
)
from flash_helpers.build import compile as compile_module
from flash_helpers.build.errors import KernelCacheError
from flash_helpers.build.store import STORE
from flash_helpers.cli import app
from flash_helpers.commands.cache import cached_objects, clear_cache
from flash_helpers.kernel_configs import ForwardKernel

Build = Callable[..., object]


@pytest.fixture
def build(
    cache: KernelCache,
    small_root: Path,
    kernel: ForwardKernel,
    fake_nvcc: FakeNvcc,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], Path]:
    def build() -> Path:
        (result,) = build_kernels([kernel], [80], cache=cache, include_root=small_root)
        assert find_library(cache, kernel, 80, small_root) == result.path
        assert built_kernels(cache, [80], small_root) == [(kernel.short_form(), 80)]
        return result.path

    monkeypatch.setattr(compile_module, "find_nvcc", lambda: fake_nvcc.nvcc)
    return build


# ---------------------------------------------------------------- no room
@pytest.mark.parametrize(
    "said", ["fatal error: error writing to x.s: No space left on device",
             "ld: final link failed: Disk quota exceeded", "File size limit exceeded (core dumped)"],
)  # fmt: skip
def test_a_full_disk_is_no_refused_kernel(
    cache: KernelCache, small_root: Path, kernel: ForwardKernel, tmp_path: Path, said: str
) -> None:
    fake = FakeNvcc(tmp_path / "failing", f"echo '{said}'; exit 1")
    with pytest.raises(KernelCacheError, match="no room to compile a kernel in") as caught:
        build_library([kernel], 80, cache=cache, include_root=small_root, nvcc=fake.nvcc)
    for part in ("cache clear", "FLASH_ATTENTION_CACHE_DIR", "bytes are free"):
        assert part in str(caught.value)
    assert isinstance(caught.value, BuildError)
    assert isinstance(caught.value, OSError)
    assert list((cache.store / "tmp").iterdir()) == []


@pytest.mark.parametrize("limit", [0, 40, 4096])
def test_a_limit_of_the_file_size_is_said_at_each_step(
    build: Callable[[], Path], tmp_path: Path, limit: int
) -> None:
    """What a full disk does to us: some write fails, the first one or a later one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        if limit < 4096:
            with pytest.raises(KernelCacheError, match="FLASH_ATTENTION_CACHE_DIR"):
                build()
        else:
            build()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    build()


@pytest.mark.compile
def test_a_small_disk_is_said_by_the_real_compiler(
    tmp_path: Path, small_root: Path, kernel: ForwardKernel
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True
    ).returncode:
        pytest.skip("only the superuser mounts a small disk; the tests above stand for it")
    try:
        with pytest.raises(KernelCacheError, match="no room to compile a kernel in"):
            build_library([kernel], 80, cache=KernelCache(disk), include_root=small_root)
    finally:
        subprocess.run(["umount", disk], check=True)


# ---------------------------------------------------------------- removed meanwhile
def test_a_build_goes_on_when_its_cache_is_removed_once(
    cache: KernelCache, small_root: Path, kernel: ForwardKernel, tmp_path: Path, build: Callable[[], Path]
) -> None:
    once = tmp_path / "once"
    fake = FakeNvcc(
        tmp_path / "removing", f'if mkdir "{once}" 2>/dev/null; then rm -rf "{cache.root}"; exit 1; fi'
    )
    result = build_library([kernel], 80, cache=cache, include_root=small_root, nvcc=fake.nvcc)
    assert result.path.read_text() == "half whole"


def test_a_cache_that_is_always_removed_is_said(
    cache: KernelCache, small_root: Path, kernel: ForwardKernel, tmp_path: Path
) -> None:
    fake = FakeNvcc(tmp_path / "removing", f'rm -rf "{cache.root}"; exit 1')
    with pytest.raises(KernelCacheError, match=r"was removed 5 times .* FLASH_ATTENTION_CACHE_DIR"):
        build_library([kernel], 80, cache=cache, include_root=small_root, nvcc=fake.nvcc)


def test_objects_that_are_cleared_before_they_are_linked_are_compiled_again(
    build: Callable[[], Path], cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, cleared = compile_module._Compiler.link, []

    def clear_and_link(self, table, objects):  # type: ignore[no-untyped-def]
        if not cleared:
            cleared.append(clear_cache(cache))
        return link(self, table, objects)

    monkeypatch.setattr(compile_module._Compiler, "link", clear_and_link)
    assert build().exists()
    assert len(cleared) == 1


# ---------------------------------------------------------------- damage
DEEP = "[" * 100_000
CONTENTS = {
    "empty": b"", "binary": bytes(range(256)), "null": b"null", "list": b"[]", "number": b"17",
    "text": b'"x"', "deep": DEEP.encode(), "deep object": b'{"values": ' + DEEP.encode(),
    "huge": b" " * (17 << 20),
    "no digest": b'{"values": {"file": "x"}}', "long number": b"9" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("place", ["objects/*/facts.json", "libraries/*/facts.json", "index/*/*.json"])
@pytest.mark.parametrize("content", [*CONTENTS, "folder", "link", "pipe"])
def test_no_content_of_a_file_hinders_a_build(
    build: Callable[[], Path], cache: KernelCache, tmp_path: Path, place: str, content: str
) -> None:
    build()
    (path,) = cache.store.glob(place)
    path.unlink()
    if content == "folder":
        (path / "full").mkdir(parents=True)
    elif content == "link":
        path.symlink_to("/dev/zero")
    elif content == "pipe":
        subprocess.run(["mkfifo", path], check=True)
    else:
        path.write_bytes(CONTENTS[content])
    cached_objects(cache)
    build()
    assert len(cached_objects(cache)) == 1


@pytest.mark.parametrize(
    "place", ["objects", "libraries", "index", "locks", "tmp", "index/*", "objects/*", "libraries/*"]
)
def test_a_file_in_the_place_of_a_folder_hinders_no_build(
    build: Callable[[], Path], cache: KernelCache, place: str
) -> None:
    build()
    (path,) = cache.store.glob(place)
    shutil.rmtree(path)
    path.write_text("in the way")
    build()


@pytest.mark.parametrize(
    ("name", "value"),
    [("file", "../k2/file.bin"), ("file", "/etc/passwd"), ("file", ".."), ("file", 5), ("size", "8")],
)
def test_facts_that_were_changed_and_sealed_again_name_no_other_file(
    cache: KernelCache, name: str, value: object
) -> None:
    from flash_helpers.content import seal, unseal

    def make(folder: Path) -> tuple[str, dict[str, object]]:
        (folder / "file.bin").write_text("contents")
        return "file.bin", {}

    cache.get_or_make("objects", "k2", make)
    facts = cache.get_or_make("objects", "k", make).path.parent / "facts.json"
    facts.write_text(seal({**unseal(facts.read_text()), name: value}))
    assert cache.get("objects", "k") is None


def test_fresh_kernels_are_listed_as_usable_though_no_library_holds_them(
    cache: KernelCache, kernel: ForwardKernel, fake_nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_library([kernel], 80, cache=cache, nvcc=fake_nvcc.nvcc)
    assert [entry.targets for entry in cached_objects(cache)] == [(80,)]
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    assert [entry.targets for entry in cached_objects(cache)] == [()]


def test_old_caches_are_not_used_but_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("objects", "libraries", "index"):
        (tmp_path / part / "k").mkdir(parents=True)
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path))
    done = CliRunner().invoke(app, ["cache", "clear", "--json", "-"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["earlier"] == [
        str(tmp_path / part) for part in ("objects", "libraries", "index")
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "libraries", "objects"]
    assert not (tmp_path / STORE).exists()
