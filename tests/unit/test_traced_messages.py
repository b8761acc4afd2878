"""Messages of assertions in a trace are constants: the Dynamo of some torch versions, such as 2.11, takes no
text that is put together, such as an f-string, for an argument of an operator."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import flash_attention

PACKAGE = Path(flash_attention.__file__).parent
ASSERTION = "assert_async"


def names_of(tree: ast.Module) -> set[str]:
    """The names by which a module calls the assertion."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == ASSERTION
    }


def is_constant(value: ast.expr, places: list[ast.AST]) -> bool:
    """Whether an expression is a text of the source, or looked up among some in a table of the module.

    Args:
        places: the function and the module in which names are assigned.
    """
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str)
    if isinstance(value, ast.Dict):
        return all(is_constant(x, places) for x in value.values)
    if isinstance(value, ast.Subscript):
        return is_constant(value.value, places)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "get":
        return is_constant(value.func.value, places)
    if isinstance(value, ast.Name):
        assigned = [
            node.value
            for place in places
            for node in (place.body if isinstance(place, ast.Module) else ast.walk(place))
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == value.id for target in node.targets)
        ]
        return bool(assigned) and all(is_constant(x, places) for x in assigned)
    # a sum of texts of the module is made once, when it is imported
    is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
    return is_sum and is_constant(value.left, places[-1:]) and is_constant(value.right, places[-1:])


def made_messages(source: str) -> list[int]:
    """The lines of assertions whose message is put together."""
    tree = ast.parse(source)
    names, found = names_of(tree), []
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in names:
                messages = [*node.args[1:], *(keyword.value for keyword in node.keywords)]
                if not messages or not is_constant(messages[0], [function, tree]):
                    found.append(node.lineno)
    return found


def test_messages_in_traces_are_constants() -> None:
    calls = 0
    for file in sorted(PACKAGE.rglob("*.py")):
        source = file.read_text()
        calls += sum(
            isinstance(node, ast.Call) and getattr(node.func, "id", None) == ASSERTION
            for node in ast.walk(ast.parse(source))
        )
        assert "torch._assert_async" not in source, f"{file}: call {ASSERTION} of torch_private"
        assert not made_messages(source), f"{file}: the messages in these lines are put together in a trace"
    assert calls >= 5


@pytest.mark.parametrize(
    ("body", "is_made"),
    [
        ("assert_async(ok, 'a text')", False),
        ("assert_async(ok, TEXT)", False),
        ("message = TABLE.get(name); assert_async(ok, message)", False),
        ("assert_async(ok, f'a {name}')", True),
        ("assert_async(ok, message=f'a {name}')", True),
        ("message = 'a ' + name; assert_async(ok, message)", True),
        ("assert_async(ok, made(name))", True),
        ("assert_async(ok, name)", True),
        ("assert_async(ok, 'a {}'.format(name))", True),
        ("assert_async(ok, 'a %s' % name)", True),
        ("assert_async(ok)", True),
    ],
)
def test_a_message_that_is_put_together_is_found(body: str, is_made: bool) -> None:
    source = (
        f"from flash_attention.torch_private import {ASSERTION}\nPART = 'part'\nTEXT = PART + ' text'\n"
        f"TABLE = {{'a': 'text'}}\ndef function(ok, name):\n    {body}\n"
    )
    assert bool(made_messages(source)) == is_made
