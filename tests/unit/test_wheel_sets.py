"""What a wheel brings: for every common call the best kernel, or one near it, without a compiler."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError

import pytest

from flash_helpers.build import CompilerNotFoundError
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.problem import AttentionProblem, visible_limits
from flash_helpers.packaging import wheel
from flash_helpers.packaging.wheel_sets import NAMES, SETS, devices_of, wheel_kernels
from flash_helpers.results.lookup import TuningResults
from flash_helpers.select.prediction import predict
from flash_helpers.select.select import ranking, select

TARGETS = (80, 86, 89, 90)
SM_SHARES = (0.5, 0.8, 1.0, 1.1)  # smaller and larger cards of a generation
CALLS = 400
MOST = 1.5  # times the best kernel's expected time that the one a wheel brings may take


def calls(seed: int) -> Iterator[tuple[str, AttentionProblem]]:
    """Sizes that no set names: lengths and batches of any number, groups of 5, 7, 16 heads."""
    draw = random.Random(seed)
    while True:
        kind = draw.choice(
            (
                "prompt",
                "packed",
                "window",
                "decode",
                "cached",
                "paged",
                "chunk",
                "chunk cached",
                "chunk paged",
            )
        )
        n_heads_kv = draw.choice((1, 2, 4, 8, 32))
        few = kind in ("decode", "cached", "paged")
        seq_len_q = 1 if few else int(2 ** draw.uniform(1, 13))
        own = kind in ("prompt", "packed", "window")
        seq_len_k = seq_len_q if own else max(seq_len_q, int(2 ** draw.uniform(5, 17)))
        causal = not (few or own) or draw.random() < 0.5
        window = (draw.choice((100, 512, 4000)), 0) if kind == "window" else (None, None)
        left, right = visible_limits(causal, window, seq_len_q, seq_len_k)
        cached = kind.split()[-1] in ("cached", "paged")
        d_head = draw.choice((64, 128, 256))
        yield (
            kind,
            AttentionProblem(
                dtype=draw.choice((DType.BF16, DType.FP16)),
                batch=draw.choice((1, 2, 3, 4, 8, 17, 64, 256)),
                seq_len_q=seq_len_q,
                seq_len_k=seq_len_k,
                n_heads=n_heads_kv * draw.choice((1, 1, 2, 4, 5, 7, 8, 16)),
                n_heads_kv=n_heads_kv,
                d_head=d_head,
                d_head_v=d_head,
                left=left,
                right=right,
                varlen=cached or kind == "packed",
                cached=cached,
                paged=kind.endswith("paged"),
                lse=draw.random() < 0.3,
            ),
        )


@pytest.mark.parametrize("target", TARGETS)
def test_no_common_call_needs_a_compiler(target):
    brought, shipped = set(wheel_kernels(target)), TuningResults(shipped_only=True)
    draw, drawn = random.Random(1), calls(seed=target)
    substituted = []
    for _ in range(CALLS):
        kind, problem = next(drawn)
        facts = draw.choice(devices_of(target))
        facts = replace(facts, sm_count=int(facts.sm_count * draw.choice(SM_SHARES)))
        best = select(problem, facts, shipped, explained=False)
        if best.kernel in brought:
            continue
        run = next((one for one in ranking(problem, facts, shipped) if one.kernel in brought), None)
        assert run is not None, (kind, problem.label(), best.kernel.short_form())
        seen = best.problem or problem
        ratio = predict(run.kernel, seen, facts).seconds / predict(best.kernel, seen, facts).seconds
        assert ratio <= MOST, (kind, problem.label(), ratio, best.kernel.short_form())
        substituted.append((kind, problem.label()))
    # Very few heads in all, or tuned results of near lengths.
    assert len(substituted) <= CALLS // 100, substituted


@pytest.mark.parametrize("target", TARGETS)
def test_gradients_of_common_calls_need_no_compiler(target):
    brought, shipped = set(wheel_kernels(target)), TuningResults(shipped_only=True)
    draw, drawn = random.Random(2), calls(seed=target + 1)
    asked = (problem for kind, problem in drawn if kind in ("prompt", "packed"))
    for _ in range(CALLS // 4):
        problem = next(asked).backward(deterministic=draw.random() < 0.3)
        facts = draw.choice(devices_of(target))
        assert select(problem, facts, shipped, explained=False).kernel in brought, problem.label()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["decode", "paged"])
def test_one_token_decoding_is_brought_whole_and_in_parts(target, name):
    """Each head size and element type; with few batch items the keys are cut into parts."""
    kernels = wheel_kernels(target, [name])
    for dtype in (DType.BF16, DType.FP16):
        for d_head in (64, 128, 256):
            traits = [k.traits for k in kernels if (k.config.dtype, k.config.d_head) == (dtype, d_head)]
            assert {t.split for t in traits} == {False, True}
            assert {t.paged for t in traits} == {name == "paged"}


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_can_be_compiled_for_its_target_and_runs_there(target):
    for kernel in wheel_kernels(target):
        direction = direction_of(kernel)
        assert direction.family.runs_on(target)
        assert not direction.missing_traits(kernel.traits)
        for facts in devices_of(target):
            assert kernel.config.infeasible_reason(facts) is None, kernel.short_form()


def test_sets_are_named_once_and_each_brings_something_of_its_own():
    assert len(set(NAMES)) == len(SETS)
    for name in NAMES:
        others = wheel_kernels(90, [other for other in NAMES if other != name])
        assert set(wheel_kernels(90, [name])) - set(others), name
    assert set(wheel_kernels(90)) == {k for name in NAMES for k in wheel_kernels(90, [name])}


@pytest.mark.parametrize("facts", devices_of(90), ids=lambda facts: facts.name)
def test_kernels_of_the_shipped_table_are_brought_beside_those_they_lead(facts):
    shipped, brought = TuningResults(shipped_only=True), set(wheel_kernels(90, ["prompts"]))
    problems = [p for p in SETS[0].problems(90) if (p.dtype, p.d_head, p.lse) == (DType.BF16, 128, False)]
    tuned, chosen = (
        {select(problem, facts, table, explained=False).kernel for problem in problems}
        for table in (shipped, None)
    )
    assert tuned - chosen
    assert tuned | chosen <= brought


@pytest.mark.parametrize("target", TARGETS)
def test_the_page_on_installing_counts_them(target):
    page = (Path(__file__).parents[2] / "docs" / "installing.md").read_text()
    assert f"| `TARGETS={target}` | {len(wheel_kernels(target))} |" in page


def test_the_page_on_installing_names_the_sets():
    page = (Path(__file__).parents[2] / "docs" / "installing.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "80", "--sets", "decode,speed"], "named 'speed'; there are prompts, packed"),
        (["--target", "120"], "target 120: no GPU of this generation is described"),
        (["--target", "80", "--sets", ""], "no set of a wheel's kernels is named ''"),
        (["--sets", "decode"], "not for which GPUs: add --target"),
        (["--kernels", "ladder"], "not for which GPUs: add --target"),
        (["--target", "80", "--sets", "decode", "--kernels", "ladder"], "give one of them"),
        (["--target", "80", "--kernels", "hopper"], "kernels of the hopper family run on sm_90a only"),
        (["--out", "/proc/version"], "--out is /proc/version, but /proc/version is no folder"),
    ],
)
def test_what_the_command_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit):
        wheel.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("error", [CompilerNotFoundError("no usable nvcc"), CalledProcessError(1, "pip")])
def test_what_cannot_be_built_ends_with_one_message(error, monkeypatch, tmp_path, capsys):
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(wheel, "build_wheel", fail)
    assert wheel.main(["--out", str(tmp_path)]) == 1
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("targets", "sets", "words"),
    [
        ("80 90", "decode paged", "--target 80 --target 90 --sets decode,paged"),
        ("80,90", "decode,paged", "--target 80 --target 90 --sets decode,paged"),
        ("80", "", "--target 80"),
        ("", "", ""),
    ],
)
def test_make_takes_lists_with_spaces_and_commas(targets, sets, words):
    assert wheel_words(f"TARGETS={targets}", f"SETS={sets}") == words.split()


def test_make_takes_the_usual_generations_by_itself():
    assert wheel_words() == [word for target in TARGETS for word in ("--target", str(target))]


def wheel_words(*variables: str) -> list[str]:
    """What ``make wheel`` gives the builder behind the folder."""
    # -o: what installs the environment counts as done. The tests may be run by make themselves.
    done = [word for mark in (".installed", ".compiler") for word in ("-o", f".venv/{mark}")]
    command = ["make", "--no-print-directory", "--dry-run", *done, "wheel", *variables]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    recipe = subprocess.check_output(command, text=True, cwd=Path(__file__).parents[2], env=environment)
    return recipe.replace("\\\n", " ").split("--out dist")[1].split()
