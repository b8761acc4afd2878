"""What the cache removes and loads is its own: nothing of the user's, nothing that others can write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from fake_nvcc import FakeNvcc

from flash_helpers import messages, trust
from flash_helpers.build import KernelCache, build_kernels, built_kernels, find_library, private_folder
from flash_helpers.build import compile as compile_module
from flash_helpers.build.store import STORE
from flash_helpers.commands.cache import cache_parts, clear_cache, earlier_folders
from flash_helpers.kernel_configs import ForwardKernel

PARTS = ("objects", "libraries", "index", "logs", "locks", "tmp")


def make(folder: Path) -> tuple[str, dict[str, object]]:
    (folder / "file.bin").write_text("contents")
    return "file.bin", {}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_said", set())


@pytest.fixture
def full_folder(tmp_path: Path) -> Path:
    """A user's folder whose own folders are named like parts of a cache, with old files in them."""
    root = tmp_path / "mine"
    for part in PARTS:
        (root / part / "thesis").mkdir(parents=True)
        (root / part / "thesis" / "chapter.txt").write_text("years of work")
        (root / part / "notes.txt").write_text("notes")
        for path in (root / part / "thesis", root / part / "notes.txt", root / part):
            os.utime(path, (1, 1))
    return root


def users_files(root: Path) -> list[str]:
    return sorted(p.read_text() for p in root.rglob("*.txt") if STORE not in p.parts)


def test_making_leaves_the_users_own_folders_alone(full_folder: Path) -> None:
    before = users_files(full_folder)
    KernelCache(full_folder).get_or_make("objects", "k", make)
    assert users_files(full_folder) == before
    assert len(before) == 2 * len(PARTS)


def test_clearing_leaves_the_users_own_folders_alone(full_folder: Path) -> None:
    cache = KernelCache(full_folder)
    before = users_files(full_folder)
    cache.get_or_make("objects", "k", make)
    assert clear_cache(cache).freed > 0
    assert users_files(full_folder) == before
    assert not cache.store.exists()
    assert earlier_folders(cache) == [full_folder / part for part in PARTS[:-1]]


@pytest.mark.parametrize("part", PARTS)
def test_no_link_is_followed(cache: KernelCache, tmp_path: Path, part: str) -> None:
    cache.get_or_make("objects", "k", make)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "thesis").mkdir(parents=True)
    (elsewhere / "thesis" / "chapter.txt").write_text("years of work")
    os.utime(elsewhere / "thesis", (1, 1))
    target = cache.store / part
    if target.exists():
        os.rename(target, tmp_path / "aside")
    target.symlink_to(elsewhere)
    with pytest.raises(OSError, match="is a link"):
        clear_cache(cache)
    if part in ("tmp", "locks", "objects"):
        with pytest.raises(OSError, match=f"{part} is a link"):
            cache.get_or_make("objects", "k2", make)
    assert all(size.bytes == 0 for size in cache_parts(cache) if size.name == part)
    assert (elsewhere / "thesis" / "chapter.txt").read_text() == "years of work"


def test_links_in_unfinished_work_are_removed_but_not_followed(cache: KernelCache, tmp_path: Path) -> None:
    cache.get_or_make("objects", "k", make)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    (cache.store / "tmp" / "link").symlink_to(tmp_path / "thesis")
    os.utime(cache.store / "tmp" / "link", (1, 1), follow_symlinks=False)
    os.utime(tmp_path / "thesis", (1, 1))
    cache.get_or_make("objects", "k2", make)
    assert list((cache.store / "tmp").iterdir()) == []
    assert (tmp_path / "thesis" / "chapter.txt").exists()


def test_clearing_leaves_a_running_build_alone(cache: KernelCache) -> None:
    def make_beside_clearing(folder: Path) -> tuple[str, dict[str, object]]:
        (folder / "half").write_text("half")
        cleared.append(clear_cache(cache))
        assert (folder / "half").exists()
        return make(folder)

    cleared: list = []  # type: ignore[type-arg]
    artifact = cache.get_or_make("objects", "k", make_beside_clearing)
    assert artifact.path.read_text() == "contents"
    assert [each.in_use for each in cleared] == [1]


# ---------------------------------------------------------------- who may have written
@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_folders_are_made_for_this_user_alone(tmp_path: Path, umask: int) -> None:
    cache = KernelCache(tmp_path / "new" / "cache")
    old = os.umask(umask)
    try:
        cache.get_or_make("objects", "k", make)
        cache.write_text("index/a/b.json", "{}")
    finally:
        os.umask(old)
    folders = [cache.root.parent, cache.root, cache.store, *(p for p in cache.store.rglob("*") if p.is_dir())]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    assert not any(p.stat().st_mode & 0o022 for p in cache.store.rglob("*/k/*"))
    assert cache.get("objects", "k") is not None


def planted(cache: KernelCache) -> Path:
    return cache.get_or_make("objects", "k", make).path


@pytest.mark.parametrize("mode", [0o777, 0o773, 0o1777])
@pytest.mark.parametrize("which", ["root", "store", "objects", "objects/k"])
def test_nothing_is_loaded_where_others_can_write(
    cache: KernelCache, which: str, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(cache)
    folder = cache.root if which == "root" else cache.store / which.removeprefix("store")
    folder.chmod(mode)
    # Others can't rename what a sticky folder holds, so it may stand above the store, as /tmp does.
    safe = which == "root" and mode == 0o1777
    assert (cache.get("objects", "k") is not None) is safe
    said = capsys.readouterr().err
    assert safe or which in ("objects", "objects/k") or f"{folder} can be written by others" in said


@pytest.mark.parametrize("name", ["file.bin", "facts.json"])
def test_a_file_that_others_can_write_is_not_loaded(cache: KernelCache, name: str) -> None:
    (planted(cache).parent / name).chmod(0o666)
    assert cache.get("objects", "k") is None
    assert cache.get_or_make("objects", "k", make).made_now


@pytest.mark.parametrize("name", ["file.bin", "facts.json", ""])
def test_links_to_planted_files_are_not_loaded(cache: KernelCache, tmp_path: Path, name: str) -> None:
    target = planted(cache).parent / name
    os.rename(target, tmp_path / "planted")
    target.symlink_to(tmp_path / "planted")
    assert cache.get("objects", "k") is None


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a file belong to somebody else: in fact where this process may, else by another name of ours."""
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345, follow_symlinks=False)
    else:
        monkeypatch.setattr(trust.os, "geteuid", lambda: os.getuid() + 1)


@pytest.mark.parametrize("which", [".", STORE, f"{STORE}/objects/k/file.bin"])
def test_nothing_is_loaded_that_belongs_to_another_user(
    cache: KernelCache, which: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(cache)
    give_away(cache.root / which, monkeypatch)
    assert cache.get("objects", "k") is None
    if which in (".", STORE):
        assert "belongs to user" in capsys.readouterr().err


def test_the_index_of_others_is_not_read(
    cache: KernelCache,
    small_root: Path,
    kernel: ForwardKernel,
    fake_nvcc: FakeNvcc,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compile_module, "find_nvcc", lambda: fake_nvcc.nvcc)
    build_kernels([kernel], [80], cache=cache, include_root=small_root)
    (entry,) = (cache.store / "index").glob("*/*.json")
    entry.chmod(0o666)
    assert find_library(cache, kernel, 80, small_root) is None
    assert built_kernels(cache, [80], small_root) == []


def test_a_foreign_cache_folder_is_not_written_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    private = private_folder._default_folder()
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(0o777)
    artifact = KernelCache(root).get_or_make("objects", "k", make)
    assert artifact.path.is_relative_to(private)
    said = capsys.readouterr().err
    assert f"{root} can be written by others (mode 777)" in said
    assert list(root.iterdir()) == []
    assert "FLASH_ATTENTION_CACHE_DIR" in said


def test_a_private_group_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o775)
    monkeypatch.setattr(trust, "_is_private_group", lambda gid: False)
    assert "can be written by others" in str(trust.untrusted_reason(tmp_path))
    monkeypatch.setattr(trust, "_is_private_group", lambda gid: True)
    assert trust.untrusted_reason(tmp_path) is None
    tmp_path.chmod(0o777)
    assert "can be written by others" in str(trust.untrusted_reason(tmp_path))


def test_a_link_to_a_folder_of_others_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to("open")
    assert "open can be written by others" in str(trust.untrusted_reason(tmp_path / "link"))
    (tmp_path / "loop").symlink_to("loop")
    assert "too many links" in str(trust.untrusted_reason(tmp_path / "loop"))
