"""The cache: concurrent makers, a killed maker, damage, a folder that can't be written."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flash_helpers import messages
from flash_helpers.build import cache as cache_module
from flash_helpers.build import private_folder
from flash_helpers.build import store as stores
from flash_helpers.build.cache import KernelCache, digest_of

DEFAULT_PRIVATE_FOLDER = private_folder._default_folder
HERE = Path(__file__).resolve()
ROOT = HERE.parents[3]


def make(folder, text="contents"):
    (folder / "file.bin").write_text(text)
    return "file.bin", {"note": 1}


def test_made_once_and_found_again(cache):
    assert cache.get("objects", "k") is None
    artifact = cache.get_or_make("objects", "k", make)
    assert artifact.made_now
    again = cache.get_or_make("objects", "k", lambda folder: pytest.fail("made twice"))
    assert (again.path, again.made_now, again.facts["note"]) == (artifact.path, False, 1)
    assert again.path.read_text() == "contents"


def test_keys_are_apart(cache):
    assert digest_of("a", ["b"]) != digest_of("a", ["c"])
    cache.get_or_make("objects", "k1", make)
    assert cache.get("objects", "k2") is None
    assert cache.get("libraries", "k1") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text(""),
        lambda path: path.write_text("c0ntents"),
        lambda path: path.write_bytes(path.read_bytes()[:3]),
        lambda path: path.unlink(),
        lambda path: (path.parent / "facts.json").write_text("{"),
        lambda path: (path.parent / "facts.json").write_text("[]"),
        lambda path: (path.parent / "facts.json").unlink(),
    ],
    ids=["empty", "changed", "truncated", "gone", "bad facts", "wrong facts", "no facts"],
)
def test_damaged_artifact_is_made_again(cache, damage):
    path = cache.get_or_make("objects", "k", make).path
    damage(path)
    assert cache.get("objects", "k") is None
    artifact = cache.get_or_make("objects", "k", make)
    assert artifact.made_now
    assert artifact.path.read_text() == "contents"
    assert list((cache.store / "tmp").iterdir()) == []


def test_failed_maker_leaves_nothing(cache):
    def fail(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.get_or_make("objects", "k", fail)
    assert list((cache.store / "tmp").iterdir()) == []
    assert cache.get_or_make("objects", "k", make).made_now


def test_maker_that_won_elsewhere_is_kept(cache):
    """Without the lock, as on a file system that has none: the first to publish wins."""

    def outrun(folder):
        KernelCache(cache.root)  # another process publishes while this one still works
        cache_module._make(cache.store, "objects", "k", make)
        return make(folder)

    stores.check_writable(cache.root)
    artifact = cache_module._make(cache.store, "objects", "k", outrun)
    assert artifact.path.read_text() == "contents"
    assert list((cache.store / "tmp").iterdir()) == []


def test_no_lock_is_needed_when_it_is_there(cache, monkeypatch):
    cache.get_or_make("objects", "k", make)
    monkeypatch.setattr(stores, "locked", lambda store, name: pytest.fail("locked"))
    assert not cache.get_or_make("objects", "k", make).made_now


def test_abandoned_work_is_swept(cache):
    cache.get_or_make("objects", "k", make)
    old, new = cache.store / "tmp" / "old", cache.store / "tmp" / "new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (1, 1))
    cache.get_or_make("objects", "k2", make)
    assert not old.exists()
    assert new.exists()


# ---------------------------------------------------------------- processes
WORKER = """
import sys, dataclasses
from pathlib import Path
from fake_nvcc import FakeNvcc
from flash_helpers.build import KernelCache, build_kernels, build
from flash_helpers.build import compile as compile_module
from flash_helpers.kernel_configs import *

folder, B_c = Path(sys.argv[1]), int(sys.argv[2])
fake = FakeNvcc.__new__(FakeNvcc)
fake.path = folder / "toolkit" / "nvcc"
compile_module.find_nvcc = lambda: fake.nvcc
config = FlashForwardKernelConfig(DType.FP16, 64, 64, B_c, 4, True, True, True, 0, 2, 2, True, True)
(result,) = build_kernels([ForwardKernel(config)], [80], cache=KernelCache(folder / "cache"),
                          include_root=folder / "include")
assert result.path.read_text() == "half whole", result.path.read_text()
print(result.path)
""".replace(", build\n", "\n")


def start(tmp_path, B_c=64):
    # Of a private folder of this machine's, kernels would be found.
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'py'}:{HERE.parent}", "TMPDIR": str(tmp_path)}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path), str(B_c)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=60):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out.strip()


@pytest.fixture
def slow_nvcc(tmp_path, small_root):
    from fake_nvcc import FakeNvcc

    return FakeNvcc(tmp_path / "toolkit", seconds=1.0)


def names(calls):
    return sorted(Path(call).suffix for call in calls)


@pytest.mark.compile
def test_eight_processes_build_the_same_kernel_once(tmp_path, slow_nvcc):
    paths = {finish(process) for process in [start(tmp_path) for _ in range(8)]}
    assert len(paths) == 1
    assert names(slow_nvcc.calls) == [".o", ".so"]


@pytest.mark.compile
def test_eight_processes_build_eight_kernels(tmp_path, slow_nvcc):
    processes = [start(tmp_path, 16 * n) for n in range(1, 9)]
    assert len({finish(process) for process in processes}) == 8
    assert names(slow_nvcc.calls) == [".o"] * 8 + [".so"] * 8


def test_killed_maker_leaves_no_half_file_and_no_lock(tmp_path, slow_nvcc):
    victim = start(tmp_path)
    waiter = start(tmp_path)
    limit = time.monotonic() + 30
    while not slow_nvcc.calls:  # until one of them is in the middle of a compilation
        assert time.monotonic() < limit
        time.sleep(0.01)
    for process in (victim, waiter):
        process.send_signal(signal.SIGKILL)
        process.communicate()
    began = time.monotonic()
    assert finish(start(tmp_path)).endswith(".so")
    # Two compiler calls of a second each, and the start of Python: no waiting for a dead process.
    assert time.monotonic() - began < 15
    objects = [path for path in (tmp_path / "cache" / stores.STORE / "objects").glob("*/*.o")]
    assert [path.read_text() for path in objects] == ["half whole"]


# ---------------------------------------------------------------- folders that can't be written
@pytest.fixture
def private_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(private_folder.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(private_folder, "_default_folder", DEFAULT_PRIVATE_FOLDER)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(private_folder, "_folders", [])
    monkeypatch.setattr(messages, "_said", set())
    return tmp_path / "temporary"


def unwritable(tmp_path):
    """A path below a file: nobody can write there, not even the superuser."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "cache"


def test_unwritable_folder_falls_back_and_says_so_once(private_temporary_folder, tmp_path, capsys):
    cache = KernelCache(unwritable(tmp_path))
    artifact = cache.get_or_make("objects", "k", make)
    assert artifact.path.is_relative_to(private_temporary_folder)
    cache.get_or_make("objects", "k2", make)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(tmp_path / "file" / "cache") in said
    assert "FLASH_ATTENTION_CACHE_DIR" in said
    (folder,) = private_temporary_folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_fallback_is_found_again_by_a_later_process(private_temporary_folder, tmp_path, monkeypatch):
    cache = KernelCache(unwritable(tmp_path))
    cache.get_or_make("objects", "k", make)
    monkeypatch.setattr(private_folder, "_folders", [])
    assert cache.get("objects", "k") is not None


def test_fallback_does_not_trust_a_folder_others_can_write(private_temporary_folder, tmp_path):
    planted = private_folder._default_folder()
    planted.mkdir()
    planted.chmod(0o777)
    artifact = KernelCache(unwritable(tmp_path)).get_or_make("objects", "k", make)
    assert not artifact.path.is_relative_to(planted)


def test_read_only_folder_is_still_read(private_temporary_folder, cache, monkeypatch):
    cache.get_or_make("objects", "k", make)

    check_writable = stores.check_writable

    def refuse(root):
        if root == cache.root:
            raise OSError(30, "Read-only file system")
        check_writable(root)

    monkeypatch.setattr(stores, "check_writable", refuse)
    assert not cache.get_or_make("objects", "k", make).made_now
    assert cache.get_or_make("objects", "k2", make).path.is_relative_to(private_temporary_folder)


def test_small_files_are_replaced_whole(cache):
    path = cache.write_text("index/a.json", json.dumps({"n": 1}))
    cache.write_text("index/a.json", json.dumps({"n": 2}))
    assert json.loads(path.read_text()) == {"n": 2}
    assert cache.read_texts("index", "*.json") == ['{"n": 2}']
