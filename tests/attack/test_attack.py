"""The short form of ``run.py``, for each change."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from calls import MISTAKES, Call, invalid_calls, random_call, valid_calls
from corruptions import corruptions, damage
from outcome import Outcome, table


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_kills_by_the_script(tmp_path: Path) -> None:
    """In a process of its own: it forks, and this one has threads."""
    script = Path(__file__).with_name("run.py")
    command = [sys.executable, script, "--kills", "2", "--corruptions", "0", "--calls", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failures: 0" in done.stdout


def test_corruptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcome = corruptions(tmp_path, 160)
    assert outcome.failures == []
    assert len(outcome.tried) == 8


def test_valid_calls() -> None:
    assert valid_calls(150).failures == []


def test_invalid_calls() -> None:
    outcome = invalid_calls(8 * len(MISTAKES))
    assert outcome.failures == []
    assert len(outcome.tried) == 3


def test_random_calls_are_valid_before_a_mistake_is_made() -> None:
    for seed in range(60):
        call = random_call(random.Random(seed))
        call.function(**call.arguments)


@pytest.mark.parametrize(
    ("function", "said"),
    [(lambda **_: None, "it was computed"), (lambda **_: {}["q"], "KeyError"),
     (lambda **_: int("x"), "not refused by us")],
)  # fmt: skip
def test_what_is_not_refused_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], said: str
) -> None:
    import calls

    function.__name__ = "attention"
    real = random_call
    monkeypatch.setattr(calls, "random_call", lambda rng: Call(function, real(rng).arguments))
    monkeypatch.setattr(calls, "MISTAKES", {"no tensor": MISTAKES["no tensor"]})
    assert said in invalid_calls(1).failures[0]


def test_damage_damages_and_failures_are_counted() -> None:
    content = bytes(range(200))
    changed = [damage(content, random.Random(seed)) for seed in range(200)]
    assert sum(each != content for each in changed) > 190
    outcome = Outcome("kill")
    outcome.tried["a"] += 3
    outcome.fail("a", 5, ValueError("no"))
    assert outcome.failures == ["kill of a, seed 5: ValueError: no"]
    assert "failures: 1" in table([outcome])
    assert json.loads(json.dumps(outcome.to_json()))["tried"] == {"a": 3}
