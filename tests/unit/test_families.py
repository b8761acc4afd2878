"""The registry of families and directions, and that nobody else tells configurations apart."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from flash_helpers.kernel_configs import DType, ForwardKernel, ForwardTraits, device_facts, get_ladder
from flash_helpers.kernels.ampere.family import AMPERE
from flash_helpers.kernels.families import (
    DIRECTIONS,
    FAMILIES,
    common_direction,
    direction_of,
    family_of,
)
from flash_helpers.kernels.hopper.family import HOPPER
from flash_helpers.kernels.names import is_config
from flash_helpers.model.of import model_of

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "py" / "flash_helpers" / "kernels"
CLASSES = {direction.config.__name__ for direction in DIRECTIONS}
CLASSES |= {"KernelConfig", "ForwardConfig", "BackwardConfig"}
_FIELDS = [{f.name for f in dataclasses.fields(direction.config)} for direction in DIRECTIONS]
FIELDS = set.union(*_FIELDS) - set.intersection(*_FIELDS)  # a field of all of them tells none apart
NAMES = {family.name for family in FAMILIES}


def branches(source: str) -> list[str]:
    """Where a text asks which class, family or field a configuration has, as lines of source."""
    return [f"line {node.lineno}: {ast.unparse(node)}" for node in _asking(ast.parse(source))]


def _asking(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            words = {
                n.id for argument in node.args[1:] for n in ast.walk(argument) if isinstance(n, ast.Name)
            }
            texts = {a.value for a in node.args[1:2] if isinstance(a, ast.Constant)}
            asks_class = node.func.id in ("isinstance", "issubclass") and words & CLASSES
            asks_field = node.func.id in ("getattr", "hasattr") and texts & FIELDS
            if asks_class or asks_field:
                yield node
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {side.id for side in sides if isinstance(side, ast.Name)}
            texts = {side.value for side in sides if isinstance(side, ast.Constant)}
            if names & CLASSES or texts & NAMES:
                yield node
        elif isinstance(node, ast.MatchClass) and getattr(node.cls, "id", "") in CLASSES:
            yield node.cls


def test_no_code_outside_a_family_asks_which_class_a_configuration_has() -> None:
    inside = tuple(KERNELS / family.name for family in FAMILIES)
    folders = (ROOT / "py", ROOT / "flash_attention", ROOT / "tools")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    asking = {
        str(path.relative_to(ROOT)): found
        for path in files
        if not any(path.is_relative_to(folder) for folder in inside)
        and (found := branches(path.read_text(encoding="utf-8")))
    }
    assert len(files) > 200
    assert asking == {}


@pytest.mark.parametrize(
    "text",
    [
        "x = 1 if isinstance(config, HopperForwardKernelConfig) else 2",
        "isinstance(kernel.config, (int, FlashForwardKernelConfig))",
        "assert isinstance(config, ForwardConfig)",
        "type(config) is HopperForwardKernelConfig",
        "getattr(config, 'eager_load_blocks', True)",
        "hasattr(config, 'next_item')",
        "family == 'hopper'",
        "'ampere' != family.name",
        "match config:\n    case HopperForwardKernelConfig():\n        pass",
    ],
)
def test_such_a_question_is_seen(text: str) -> None:
    assert len(branches(text)) == 1


def test_a_kernel_has_the_direction_of_its_configuration() -> None:
    for direction in DIRECTIONS:
        kernels = direction.built()
        assert kernels
        for kernel in kernels:
            assert direction_of(kernel) is direction_of(kernel.config) is direction
            assert family_of(kernel) is direction.family
            assert is_config(kernel.config)
            assert direction.names.read(kernel.short_form()) == kernel.config
    assert len({direction.label for direction in DIRECTIONS}) == len(DIRECTIONS)


def test_what_is_no_configuration_is_named() -> None:
    assert not is_config("(FP16, 128, 64, 64, 4)")
    with pytest.raises(TypeError, match="type str; known: FlashForwardKernelConfig, HopperForward"):
        direction_of("(FP16, 128, 64, 64, 4)")  # type: ignore[arg-type]


def test_a_library_is_of_one_direction() -> None:
    first, second, *others = (direction.built()[0] for direction in DIRECTIONS)
    assert common_direction([first, first]) is DIRECTIONS[0]
    with pytest.raises(ValueError, match="exactly one direction of one family; given: ampere, hopper"):
        common_direction([first, second])
    with pytest.raises(ValueError, match="given: ampere, ampere_backward, hopper, hopper_backward"):
        common_direction([first, second, *others])
    with pytest.raises(ValueError, match="given: none"):
        common_direction([])


@pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda direction: direction.label)
def test_every_direction_answers_for_each_kernel_it_lists(direction) -> None:
    model = direction.model
    for config in (*direction.candidates(), *direction.tuned()):
        assert set(direction.neighbours) <= {f.name for f in dataclasses.fields(config)}
        if model is None:
            continue
        assert model_of(config) is model
        assert model.registers(config).total > 0
        assert model.instructions(config) > 0
        assert model.wavefronts(config) > 0
    for d_head in direction.ladder.steps if direction.ladder is not None else ():
        assert get_ladder(direction.label, DType.BF16, d_head, True)


def test_a_direction_without_a_model_says_that_nothing_can_be_predicted(monkeypatch) -> None:
    direction = dataclasses.replace(DIRECTIONS[0], model=None)
    config = direction.built()[0].config
    monkeypatch.setattr("flash_helpers.model.of.direction_of", lambda _: direction)
    with pytest.raises(ValueError, match="ampere kernels have no cost model, so nothing of "):
        model_of(config)


def test_missing_traits_are_those_that_are_on_and_not_made() -> None:
    direction = dataclasses.replace(DIRECTIONS[0], traits=("causal",))
    assert direction.missing_traits(ForwardTraits(causal=True)) == ()
    assert direction.missing_traits(ForwardTraits(causal=True, paged=True, sinks=True)) == ("sinks", "paged")
    assert ForwardKernel(direction.built()[0].config).malformed_reason() is None


@pytest.mark.parametrize(
    ("capability", "able"), [((7, 5), ""), ((8, 0), "a"), ((9, 0), "ah"), ((10, 0), "a"), ((12, 0), "a")]
)
def test_a_family_says_where_it_runs(capability: tuple[int, int], able: str) -> None:
    facts = dataclasses.replace(device_facts("H100"), name="CARD", capability=capability)
    begin = f"CARD has compute capability {capability[0]}.{capability[1]}; kernels of the"
    ampere, hopper = (family.unable_reason(facts) for family in (AMPERE, HOPPER))
    assert ampere == (None if "a" in able else f"{begin} ampere family run on 8.0 and newer")
    assert hopper == (None if "h" in able else f"{begin} hopper family run on 9.0 only, which has wgmma")
