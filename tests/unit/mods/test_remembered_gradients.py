"""Calls with functions whose gradients are recorded, made before: both passes are found again.

What has changed is noticed. Tables of calls are stood for by classes of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention import attention, attention_varlen
from flash_attention.backends import cuda_backward
from flash_attention.backends.cuda_backward_form import Form, TileRoom
from flash_attention.call import Ran
from flash_attention.mods import and_masks, remembered
from flash_attention.run import launch_cache, passes
from flash_helpers.kernels.arguments import ModArguments
from flash_helpers.kernels.problem import BACKWARD, FORWARD

KEY = ("attention", False, None, (None, None), 0.0, True)
SEQ, HEADS = 8, 2


class Passes:
    """Stands for both tables: the forward pass doubles q, a backward pass doubles the output's gradient."""

    def __init__(self) -> None:
        self.forward: list[tuple[Any, ...]] = []
        self.backward: list[tuple[Any, ...]] = []

    def call(self, *given: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
            return None
        self.forward.append(given)
        q = given[0]
        rows = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
        return 2 * q, torch.zeros(rows)

    def call_backward(self, *given: Any) -> Any:
        self.backward.append(given)
        _, k, v, _, _, dout, *_ = given
        return 2 * dout, torch.zeros_like(k), torch.zeros_like(v), None


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    remembered._known.clear()
    made: dict[Any, Any] = {}
    monkeypatch.setattr(launch_cache, "_tables", made)
    yield made
    remembered._known.clear()


def know(tables: dict[Any, Any], options: dict[str, Any], name: str = "attention", **wanted: bool) -> Passes:
    """Both passes of a call are remembered. wanted: of which gradients; else all."""
    given = options.get("score_mod"), options.get("mask_mod")
    remembered.recorded(*given, torch.device("cpu"))
    mods = launch_cache.mods_of(*given)
    assert mods is not None
    both, key = Passes(), (name, *KEY[1:], *mods[0])
    tables[key] = (both, both.call, ())
    which = [wanted.get(x, not wanted) for x in "qkv"]
    key = launch_cache.of_gradients((name, *KEY[1:5], False, *mods[0]), *which, False)
    tables[key] = (both, both.call_backward, ())
    return both


def leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape or (1, SEQ, HEADS, 16), generator=generator).half().requires_grad_()


def biased(table: Tensor) -> dict[str, Any]:
    return {"score_mod": lambda s, b, h, q, k: s + table[h] * (k - q)}


def test_both_passes_are_repeated(tables: dict[Any, Any]) -> None:
    table = torch.rand(HEADS)
    options = biased(table)
    both = know(tables, options)
    q, k, v = leaf(), leaf(), leaf()
    out = attention(q, k, v, **options)
    assert torch.equal(out, 2 * q)
    dout = torch.randn_like(out)
    dq, *_ = torch.autograd.grad(out, (q, k, v), dout)
    assert torch.equal(dq, 2 * dout)
    (forward,), (backward,) = both.forward, both.backward
    assert forward[3:10] == (None,) * 7
    assert forward[10:] == (table,)
    assert backward[6:12] == (None,) * 6
    assert [x.data_ptr() for x in backward[12:]] == [table.data_ptr()]


def test_packed_sequences_keep_their_places(tables: dict[Any, Any]) -> None:
    table, ends = torch.rand(HEADS), torch.tensor([0, 3, SEQ], dtype=torch.int32)
    options = biased(table)
    both = know(tables, options, "attention_varlen")
    q, k, v = (leaf(SEQ, HEADS, 16) for _ in range(3))
    attention_varlen(q, k, v, ends, ends.clone(), 5, 5, **options).float().sum().backward()
    (forward,), (backward,) = both.forward, both.backward
    assert forward[5] is ends
    assert forward[10:] == (5, 5, table)
    assert backward[12:14] == (5, 5)
    assert backward[14].data_ptr() == table.data_ptr()


def backward_of_a_mask(tables: dict[Any, Any], document: Tensor, mask_mod: Any) -> tuple[Any, ...]:
    """What a backward pass is asked with behind its own tensors; the forward pass compares contents."""
    both = know(tables, {"mask_mod": mask_mod})
    attention(leaf(), leaf(), leaf(), mask_mod=mask_mod).float().sum().backward()
    assert both.forward[0][10:] == ((0,), document)
    *before, captured = both.backward[0][12:]
    assert captured.data_ptr() == document.data_ptr()
    return tuple(before)


def test_bits_of_tiles_are_of_the_forward_pass_alone(tables: dict[Any, Any]) -> None:
    """A backward pass finds its own in every launch."""
    document = torch.arange(SEQ) // 3
    assert backward_of_a_mask(tables, document, lambda b, h, q, k: document[q] >= document[k]) == ()


def test_documents_are_of_both_passes(tables: dict[Any, Any]) -> None:
    """Where packed sequences begin is found once, from what is in a tensor."""
    document = torch.arange(SEQ) // 3
    causal = lambda b, h, q, k: q >= k  # noqa: E731
    mask_mod = and_masks(causal, lambda b, h, q, k: document[q] == document[k])
    assert backward_of_a_mask(tables, document, mask_mod) == ((0,),)


def test_what_is_wanted_tells_passes_apart(tables: dict[Any, Any]) -> None:
    options = biased(torch.rand(HEADS))
    both = know(tables, options, q=True)
    q, other = leaf(), leaf().detach()
    attention(q, other, other, **options).float().sum().backward()
    assert len(both.backward) == 1
    k = leaf()
    attention(q, k, other, **options).float().sum().backward()
    assert (len(both.forward), len(both.backward)) == (2, 1)


def test_a_captured_tensor_that_was_written_to_is_an_error(tables: dict[Any, Any]) -> None:
    table = torch.rand(HEADS)
    options = biased(table)
    both = know(tables, options)
    out = attention(leaf(), leaf(), leaf(), **options)
    table.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()
    assert not both.backward


def test_gradients_of_captured_tensors_take_the_long_way_back(tables: dict[Any, Any]) -> None:
    table = torch.rand(HEADS).requires_grad_()
    options = biased(table)
    both = know(tables, options)
    q, k, v = leaf(), leaf(), leaf()
    grads = torch.autograd.grad(attention(q, k, v, **options).float().sum(), (q, k, v, table))
    assert len(both.forward) == 1
    assert not both.backward
    assert grads[3].shape == table.shape
    frozen = [x.detach() for x in (q, k, v)]
    (only,) = torch.autograd.grad(attention(*frozen, **options).float().sum(), table)
    assert torch.equal(only, grads[3])
    assert len(both.forward) == 2


def test_numbers_that_change_are_another_call(tables: dict[Any, Any]) -> None:
    factor = 2.0
    options = {"score_mod": lambda s, b, h, q, k: s * factor}
    both = know(tables, options)
    q, k, v = leaf(), leaf(), leaf()
    attention(q, k, v, **options)
    assert len(both.forward) == 1
    factor = 3.0
    out = attention(q, k, v, **options)
    assert len(both.forward) == 1
    assert torch.equal(out, attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 3.0))


def test_create_graph_finds_the_pass_and_no_second_derivative(tables: dict[Any, Any]) -> None:
    options = biased(torch.rand(HEADS))
    both = know(tables, options)
    leaves = [leaf() for _ in range(3)]
    out = attention(*leaves, **options)
    dq, _, _ = torch.autograd.grad(out.float().sum(), leaves, create_graph=True)
    assert len(both.backward) == 1
    with pytest.raises(NotImplementedError, match="a gradient of attention's gradients"):
        torch.autograd.grad(dq.float().sum(), leaves[0])


# ---------------------------------------------------------------------- what the long way tells tables of
class Table:
    """Writes down what it is told of and what it is asked."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.asked: list[tuple[Any, ...]] = []

    def remember(self, given: tuple[Any, ...], *_: Any) -> None:
        self.told.append(given)

    def call(self, *given: Any) -> None:
        self.asked.append(given)


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether a table is asked with what it was told of: the same tensors, perhaps as they are kept."""
    return len(one) == len(other) and all(
        x.data_ptr() == y.data_ptr() and x.shape == y.shape if isinstance(x, Tensor) else x == y
        for x, y in zip(one, other, strict=True)
    )


@pytest.fixture
def told(tables: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Table]:
    """Tables of both directions, which hear of calls that the CPU computes as if kernels did."""
    made: dict[str, Table] = {}
    table_of = lambda direction: made.setdefault(direction, Table())  # noqa: E731
    monkeypatch.setattr(
        launch_cache,
        "backend",
        lambda name: SimpleNamespace(call_table=table_of, maker_like=lambda x: x.clone),
    )
    real = passes.backend
    launched = SimpleNamespace(launch=print, arguments=(), workspace=torch.zeros(8))

    def run(call: Any, choice: Any) -> Ran:
        real("cpu").run(call, choice)
        return Ran(choice.kernel, launched)  # type: ignore[arg-type]

    def run_backward(call: Any, choice: Any) -> Any:
        real("cpu_gradients").run_backward(call, choice)
        return launched

    one = SimpleNamespace(run=run, run_backward=run_backward)
    monkeypatch.setattr(passes, "backend", lambda name: one)
    return made


@pytest.mark.parametrize("learns", [False, True])
def test_the_long_way_tells_of_both_passes_as_they_are_asked_for(
    told: dict[str, Table], learns: bool
) -> None:
    table = torch.rand(HEADS, requires_grad=learns)
    options = biased(table)
    q, k, v = leaf(), leaf(), leaf()
    found = []
    for _ in range(4):
        wanted = (q, k, v, table) if learns else (q, k, v)
        found.append(torch.autograd.grad(attention(q, k, v, **options).float().sum(), wanted))
    for grads in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(grads, found[0], strict=True))
    forward = told[FORWARD]
    assert same(forward.told[0], forward.asked[-1])
    assert forward.told[0][10:] == (table,)
    if learns:
        assert BACKWARD not in told  # it gathers gradients of captured tensors
    else:
        assert len(told[BACKWARD].told[0]) == len(told[BACKWARD].asked[-1]) == 13
        assert told[BACKWARD].told[0][12].data_ptr() == told[BACKWARD].asked[-1][12].data_ptr()


@pytest.mark.parametrize("wanted", [False, True])
def test_what_was_recorded_anew_is_not_remembered_as_what_it_was(
    tables: dict[Any, Any], told: dict[str, Table], wanted: bool
) -> None:
    """A function that asks a tensor for its size does something else where the tensor was resized."""
    table = torch.rand(SEQ)
    options = {"score_mod": lambda s, b, h, q, k: s + table[k % table.shape[0]]}
    q = leaf() if wanted else leaf().detach()

    def call() -> None:
        out = attention(q, leaf().detach(), leaf().detach(), **options)
        if wanted:
            out.float().sum().backward()

    for _ in range(2):
        call()
    before = set(tables)
    assert len(told[FORWARD].told) == 1
    table.resize_(SEQ // 2)
    call()
    assert len(told[FORWARD].told) == 1
    call()
    assert len(told[FORWARD].told) == 2
    assert len(set(tables) - before) == len(before) == 1 + wanted


def test_bits_that_a_backward_launch_finds_lie_in_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    sizes = (100, 0, 300)
    functions = cuda_backward.Functions(lambda *given: told.append(given), lambda arguments: sizes)
    kernel: Any = object()
    monkeypatch.setattr(cuda_backward, "_functions", {-1: {kernel: functions}})
    monkeypatch.setattr(cuda_backward, "current_stream", lambda index: 5)
    lse, mod = torch.zeros(1, 2, 64), ModArguments((1,), ())
    arguments: Any = ("arguments",)
    room = TileRoom(640, (0, 80, 4))
    launched = cuda_backward._launch(kernel, -1, Form(arguments, lse, [], (), mod, room))
    ((given, stream, delta, first, second, third, told_mod),) = told
    begin, end = launched.workspace.data_ptr(), launched.workspace.data_ptr() + launched.workspace.numel()
    assert (given, stream) == (arguments, 5)
    assert (delta, first, second, third) == (begin, begin + 512, 0, begin + 768)
    words, *strides = told_mod.tiles
    assert words == begin + 1280
    assert words + 640 <= end
    assert strides == [0, 80, 4]
    cuda_backward._launch(kernel, -1, Form(arguments, lse, [], (), mod))
    assert told[1][-1] == mod
    cuda_backward._launch(kernel, -1, Form(arguments, lse, [], ()))
    assert len(told[2]) == 6
    assert launched.arguments == told[0]
