"""What an installation holds: the kernels' sources, and no need for a C++ compiler."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flash_helpers.kernels import cpp_headers

pytestmark = pytest.mark.install

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built offline from the source archive alone, on a machine without a C++ compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(
        "*.so", ".git", ".venv", "build.lib", "__pycache__", ".*_cache", "*.egg-info", "generated"
    )
    for name in ("flash_attention", "py", "src", "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, folder)
    make_archive = "from setuptools.build_meta import build_sdist; build_sdist('archive')"
    subprocess.run([sys.executable, "-c", make_archive], cwd=folder, check=True, capture_output=True)
    (archive,) = (folder / "archive").glob("*.tar.gz")
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    command = [sys.executable, "-m", "pip", "wheel", *offline, "-w", folder / "out", archive]
    without_compiler = {**os.environ, "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    subprocess.run(command, env=without_compiler, check=True, capture_output=True)
    (path,) = (folder / "out").glob("*.whl")
    return path


def test_wheel_holds_every_source(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [
        path.relative_to(ROOT / "src")
        for path in (ROOT / "src").rglob("*")
        if path.suffix in (".cuh", ".hpp", ".cpp")
    ]
    sources = [path for path in sources if "generated" not in path.parts]
    assert {f"flash_helpers/csrc/{path}" for path in sources} <= names
    assert {f"flash_helpers/csrc/include/generated/{name}" for name in cpp_headers.headers()} <= names
    modules = [path.relative_to(ROOT / "py") for path in (ROOT / "py").rglob("*.py")]
    modules += [path.relative_to(ROOT) for path in (ROOT / "flash_attention").rglob("*.py")]
    assert {str(path) for path in modules} <= names
    tables = (ROOT / "py" / "flash_helpers" / "results" / "tables").glob("*.json")
    assert {str(path.relative_to(ROOT / "py")) for path in tables} <= names


def test_installed_package_finds_its_sources_in_a_read_only_folder(wheel, tmp_path):
    site = tmp_path / "site-packages"
    zipfile.ZipFile(wheel).extractall(site)
    for path in [site, *site.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    code = """
import sys
sys.modules["flash_attention_kernels"] = None  # as where it is not installed: a checkout's may be
from flash_helpers.build.sources import include_root
from flash_helpers.build.errors import BuildError
from flash_helpers.build.instantiations import kernel_source
from flash_attention.errors import BindingNotBuiltError
from flash_attention.backends import cuda
print(include_root())
try:
    cuda.registered_kernels()
except BindingNotBuiltError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    for path in [site, *site.rglob("*")]:
        path.chmod(0o755)  # so that it can be removed
    lines = run.stdout.splitlines()
    assert lines[0] == str(site / "flash_helpers" / "csrc" / "include")
    assert "install g++ 10 or newer" in lines[1]


def test_metadata_is_complete_and_its_links_are_absolute(wheel):
    """What the package index shows."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    header, _, text = archive.read(name).decode().partition("\n\n")
    fields = [line.partition(": ")[::2] for line in header.splitlines()]
    urls = {value.partition(", ")[0] for key, value in fields if key == "Project-URL"}
    assert urls == {"Repository", "Documentation", "Changelog", "Issues"}
    classifiers = [value for key, value in fields if key == "Classifier"]
    for minor in range(10, 14):
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers
    assert any(key == "Keywords" for key, _ in fields)
    assert ("Description-Content-Type", "text/markdown") in fields
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("https://")] == []
    assert any(link.endswith("/raw/main/docs/kernels/figures/attention-h200.svg") for link in links)


def test_requirements_come_with_the_package(wheel):
    inside = zipfile.ZipFile(wheel)
    kept = inside.read("flash_helpers/requirements/cuda-compiler.txt").decode()
    assert kept == (ROOT / "requirements" / "cuda-compiler.txt").read_text()
