"""The runner of random cases: what is drawn fits what is built, failures shrink to a line that repeats."""

from __future__ import annotations

import json
import re

import pytest
import typer
from hypothesis import HealthCheck, find, settings
from typer.testing import CliRunner

from flash_helpers.kernel_configs import KNOWN_DEVICES, DType, device_facts
from flash_helpers.kernels.families import FAMILIES, direction_of, family_of
from flash_helpers.kernels.parsing import parse_kernel_name_into_config
from flash_helpers.test import random_cases, random_gradients
from flash_helpers.test.cases import Case
from flash_helpers.test.draws import for_each
from flash_helpers.test.random_cases import KernelSet, cases, kernels_for, run_cases, run_workers


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_a_bounded_set_of_kernels_has_every_feature(name):
    facts = device_facts(name)
    kernels = kernels_for(facts)
    assert len(kernels) < 96
    assert {family_of(kernel) for kernel in kernels} == set(
        FAMILIES if facts.capability == (9, 0) else FAMILIES[:1]
    )
    for trait in ("causal", "window", "softcap", "sinks", "split", "padded_head", "paged"):
        for dtype in DType:
            assert any(getattr(k.traits, trait) for k in kernels if k.config.dtype is dtype)
    for kernel in kernels:
        assert parse_kernel_name_into_config(kernel.config.short_form()) == kernel.config


def test_cases_are_found_for_every_kernel():
    kernels = kernels_for(device_facts("H100"))
    quick = settings(max_examples=3000, suppress_health_check=list(HealthCheck), database=None)
    for kernel in [k for k in kernels if not k.traits.split][::6]:
        name = kernel.config.short_form()
        case = find(
            cases(KernelSet(kernels, [kernel])), lambda case, name=name: case.config == name, settings=quick
        )
        assert case.dtype is kernel.config.dtype
        assert case.causal == kernel.traits.causal


def test_differentiated_calls_take_a_bounded_set_of_kernels():
    facts, drawn = device_facts("H100"), []
    for first, (n, seed) in enumerate(random_cases.shares_of(1000, 0, 16)):
        for_each(random_gradients.share(first, 16, facts), n, seed, drawn.append)
    kernels = random_gradients.kernels_of(drawn, facts)
    assert len(kernels) < 320
    named = {
        family_of(parse_kernel_name_into_config(case.backward_config))
        for case in drawn
        if case.backward_config
    }
    assert named == set(FAMILIES)
    assert any(not case.backward_config for case in drawn)
    backward = [kernel for kernel in kernels if direction_of(kernel).name == "backward"]
    for trait in ("causal", "window", "softcap", "padded_head"):
        assert len({k.config.d_head for k in backward if getattr(k.traits, trait)}) >= 2, trait
    assert {case.deterministic for case in drawn} == {False, True}
    assert any(case.diagonal_offset for case in drawn)
    assert any(case.sinks for case in drawn)


def test_cases_on_the_cpu_in_processes():
    parts = run_workers("cpu", 12, seed=3, workers=2, timeout=120)
    assert sum(part["cases"] for part in parts) >= 12
    assert not any(part["failures"] for part in parts)


def test_a_failure_shrinks_and_says_how_to_repeat_it(monkeypatch):
    def check(self: Case, device: str) -> None:
        if self.seq_len_q > 5 and self.softcap:
            raise RuntimeError("the launch failed")

    monkeypatch.setattr(Case, "check", check)
    (failure,) = run_cases(cases(), "cpu", 200, seed=0)["failures"]
    assert re.search(r"seq_len_q=6, ", failure)
    assert "group=1," in failure
    assert failure.strip().splitlines()[-1].startswith("python -c ")


def test_the_command_writes_its_result(tmp_path):
    app = typer.Typer()
    app.command()(random_cases.main)
    path = tmp_path / "new" / "random.json"
    arguments = ["--cases", "5", "--device", "cpu", "--workers", "0", "--seed", "9", "--json", str(path)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    written = json.loads(path.read_text())
    assert written["cases"] >= 5
    assert written["failures"] == []
    assert sum(written["kernels"].values()) == written["cases"]
