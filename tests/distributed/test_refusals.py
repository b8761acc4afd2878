"""What is refused, and that no rank waits for ever: ranks that disagree, refuse, come late or end."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Gone, Raised, Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask

from flash_attention import distributed as cp
from flash_attention.distributed import Layout
from flash_attention.errors import ModError, PeerLostError

LIMIT = 5.0
SLACK = 12.0  # what a slow machine may add to a time limit


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Two processes for a test after which they may be of no use."""
    group = Ranks(2)
    yield group
    group.close()


def shards(layout: Layout, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    return [layout.shard(torch.randn(1, layout.total, 2, 16).to(dtype), rank) for _ in range(3)]


# ---------------------------------------------------------------------- on a rank
def with_options(options: list[dict[str, object]]) -> object:
    layout = Layout.zigzag(32, 2)
    return cp.attention(*shards(layout), layout=layout, timeout=LIMIT, **options[dist.get_rank()]).shape  # type: ignore[arg-type,union-attr]


def with_layouts(layouts: list[Layout]) -> object:
    layout = layouts[dist.get_rank()]
    return cp.attention(*shards(layout), layout=layout, timeout=LIMIT).shape  # type: ignore[union-attr]


def one_refuses() -> object:
    layout = Layout.zigzag(32, 2)
    q, k, v = shards(layout, torch.bfloat16 if dist.get_rank() == 0 else torch.float32)
    return cp.attention(q, k, v, layout=layout, timeout=LIMIT).shape  # type: ignore[union-attr]


def one_gives(kind: str) -> object:
    """Rank 0 gives what is refused before anything of the call is known."""
    layout = Layout.zigzag(32, 2)
    q, k, v = shards(layout)
    given: dict[str, Any] = {"layout": layout, "timeout": LIMIT}
    if dist.get_rank() == 0:
        given |= {"keyword": {"dropout_p": 0.1}, "timeout": {"timeout": "long"}}.get(kind, {})
    if kind == "no tensor":
        q = q if dist.get_rank() else None  # type: ignore[assignment]
    if kind == "some DTensors":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        q, k, v = (distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v))
        k = k if dist.get_rank() else k.to_local()  # type: ignore[attr-defined]
        given["layout"] = None
    begin = time.monotonic()
    try:
        cp.attention(q, k, v, **given)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "returned"


def gathers(kind: str) -> object:
    layout = Layout.zigzag(32, 2)
    x = shards(layout)[0]
    if dist.get_rank() == 1:
        x = {"type": x.float(), "heads": x[:, :, :1], "rows": x[:, :3]}.get(kind, x)
        if kind == "sleep":
            time.sleep(LIMIT + 2)
            return "slept"
        if kind == "layout":
            layout = Layout.contiguous(32, 2)
        if kind == "call":
            return cp.attention(x, x, x, layout=layout, timeout=LIMIT).shape  # type: ignore[union-attr]
    begin = time.monotonic()
    try:
        return cp.gather(x, layout, timeout=LIMIT).shape
    except PeerLostError:
        return time.monotonic() - begin


def one_does_not_call(rank: int) -> object:
    if dist.get_rank() == rank:
        time.sleep(LIMIT + 2)
        return "slept"
    layout = Layout.zigzag(32, 2)
    begin = time.monotonic()
    try:
        cp.attention(*shards(layout), layout=layout, timeout=LIMIT)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "returned"


def one_ends_between_passes(rank: int) -> object:
    layout = Layout.zigzag(32, 2)
    q, k, v = (x.requires_grad_() for x in shards(layout))
    out = cp.attention(q, k, v, layout=layout, timeout=LIMIT, method="ring")
    assert isinstance(out, Tensor)
    if dist.get_rank() == rank:
        os._exit(7)
    begin = time.monotonic()
    try:
        out.sum().backward()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "returned"


def halved(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score / 2


def times(factor: float, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * factor


def looked_up(table: Tensor, score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score + table[h]


def usual() -> object:
    layout = Layout.zigzag(32, 2)
    return tuple(cp.attention(*shards(layout), layout=layout, timeout=LIMIT).shape)  # type: ignore[union-attr]


# ---------------------------------------------------------------------- ranks that differ
@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ({"causal": True}, {}, r"causal is True on rank 0 and False on rank 1"),
        ({"window": (4, 0)}, {"window": (5, 0)}, r"window is 4, 0 on rank 0 and 5, 0 on rank 1"),
        ({"softcap": 2.0}, {}, r"softcap is 2.0 on rank 0 and 0.0 on rank 1"),
        ({"method": "ring"}, {"method": "ulysses"}, r"method is ring on rank 0 and ulysses on rank 1"),
        ({"return_lse": True}, {}, r"return_lse is True on rank 0"),
        (
            {"score_mod": halved},
            {},
            r"score_mod and mask_mod is mod_\w+, number \w+ on rank 0 and none on rank 1",
        ),
        (
            {"score_mod": partial(times, 2.0)},
            {"score_mod": partial(times, 3.0)},
            r"score_mod and mask_mod is mod",
        ),
        ({"validate": True}, {}, r"validate is True on rank 0 and False on rank 1"),
        (
            {"validate": True, "sinks": torch.tensor([1.0, 2.0])},
            {"validate": True, "sinks": torch.tensor([1.0, 3.0])},
            r"disagree: the values of sinks is number \w+ on rank 0 and number \w+ on rank 1; all",
        ),
        (
            {"validate": True, "score_mod": partial(looked_up, torch.tensor([2.0, 1.0]))},
            {"validate": True, "score_mod": partial(looked_up, torch.tensor([3.0, 1.0]))},
            r"disagree: the values of captured tensors is number",
        ),
    ],
)
def test_ranks_that_disagree_are_told_about_what(
    ranks: Ranks, one: dict[str, object], other: dict[str, object], message: str
) -> None:
    assert ranks.run(usual) == [(1, 16, 2, 16)] * 2
    begin = time.monotonic()
    answers = ranks.run(with_options, [one, other])
    assert all(isinstance(a, Raised) and a.name == "RanksDisagreeError" for a in answers), answers
    assert all("all must pass the same" in answer.message for answer in answers)
    assert re.search(message, answers[0].message), answers[0].message
    assert time.monotonic() - begin < SLACK
    assert ranks.run(usual) == [(1, 16, 2, 16)] * 2  # the group is as good as before


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_layouts_that_differ_are_seen(ranks: Ranks) -> None:
    answers = ranks.run(with_layouts, [Layout.zigzag(32, 2), Layout.contiguous(32, 2)])
    assert all(isinstance(a, Raised) and a.name == "RanksDisagreeError" for a in answers), answers
    assert "layout is zigzag of 32, number" in answers[0].message


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_rank_that_refuses_its_arguments_tells_the_others(ranks: Ranks) -> None:
    zero, one = ranks.run(one_refuses)
    assert (zero.name, one.name) == ("RanksDisagreeError", "TypeError")
    assert "rank 1 of the context-parallel group refused its arguments" in zero.message
    assert one.message in zero.message
    assert ranks.run(usual) == [(1, 16, 2, 16)] * 2


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("keyword", "TypeError", "attention has no argument dropout_p"),
        ("timeout", "TypeError", "timeout is 'long'; it must be a real number"),
        ("no tensor", "TypeError", "q is None; it must be a torch.Tensor"),
        ("some DTensors", "TypeError", "only q, v are DTensors"),
    ],
)
def test_whatever_a_rank_refuses_the_others_hear(ranks: Ranks, kind: str, error: str, message: str) -> None:
    zero, one = ranks.run(one_gives, kind)
    assert zero[0] == error
    assert message in zero[1]
    assert one[0] == "RanksDisagreeError"
    assert message in one[1]
    assert max(zero[2], one[2]) < LIMIT  # nobody has waited for the time limit
    assert ranks.run(usual) == [(1, 16, 2, 16)] * 2


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("type", "the type is torch.bfloat16 on rank 0 and torch.float32 on rank 1"),
        ("heads", "the shape of x is 1, rows, 2, 16 on rank 0 and 1, rows, 1, 16 on rank 1"),
        ("rows", "rank 1 of the context-parallel group refused its arguments"),
        ("layout", "layout is zigzag of 32, number"),
        ("call", "disagree: the call is gather on rank 0 and attention on rank 1; all must pass the same"),
    ],
)
def test_ranks_that_gather_different_things_are_told(ranks: Ranks, kind: str, message: str) -> None:
    """gloo ends a process that gets more than it waits for."""
    answers = ranks.run(gathers, kind)
    assert all(isinstance(answer, Raised) for answer in answers), answers
    assert answers[0].name == "RanksDisagreeError"
    assert message in answers[0].message
    assert ranks.run(usual) == [(1, 16, 2, 16)] * 2


# ---------------------------------------------------------------------- ranks that are not there
def test_a_rank_that_does_not_gather_ends_the_others_wait(pair: Ranks) -> None:
    zero, one = pair.run(gathers, "sleep")
    assert one == "slept"
    assert LIMIT <= zero < LIMIT + SLACK


@pytest.mark.parametrize("asleep", [0, 1])
def test_a_rank_that_does_not_call_ends_the_others_wait(pair: Ranks, asleep: int) -> None:
    answers = pair.run(one_does_not_call, asleep)
    assert answers[asleep] == "slept"
    name, message, seconds = answers[1 - asleep]
    assert name == "PeerLostError"
    assert f"had no answer from every other rank within {LIMIT:g} s" in message
    assert seconds < LIMIT + SLACK


def test_a_rank_that_ends_between_the_passes_ends_the_others_wait(pair: Ranks) -> None:
    answers = pair.run(one_ends_between_passes, 1)
    assert isinstance(answers[1], Gone)
    name, message, seconds = answers[0]
    assert name == "PeerLostError"
    assert "did not finish its exchange with rank 1" in message
    assert seconds < LIMIT + SLACK


# ---------------------------------------------------------------------- arguments, in one process
@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def rows(n: int = 8, d: int = 16, heads: int = 2) -> Tensor:
    return torch.ones(1, n, heads, d, dtype=torch.bfloat16)


LAYOUT = Layout.zigzag(8, 1)
BLOCKS = create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu")
SLOPES = torch.ones(2, requires_grad=True)


def learnt(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score * SLOPES[h]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (TypeError, r"^layout is None; it must be a Layout, e.g. Layout.zigzag", {"layout": None}),
        (ValueError, r"^layout has 2 ranks and the group 1; they must", {"layout": Layout.zigzag(8, 2)}),
        (ValueError, r"^q has 8 rows; rank 0 of this layout .* has 9: use", {"layout": Layout.zigzag(9, 1)}),
        (ValueError, r"^method is 'rings'; it must be one of auto, all_gather", {"method": "rings"}),
        (TypeError, r"^window is 4; it must be two values", {"window": 4}),
        (TypeError, r"^causal is 'yes'; it must be True or False", {"causal": "yes"}),
        (ValueError, r"^timeout is 0.0; it must be a number of seconds above 0", {"timeout": 0}),
        (ValueError, r"^reserved_sms is -1; it must be an int, at least 0", {"reserved_sms": -1}),
        (TypeError, r"^group is 'world'; it must be a ProcessGroup, one dimension", {"group": "world"}),
        (TypeError, r"dropout_p", {"dropout_p": 0.1}),
        (TypeError, r"^score_mod is 2; it must be a function or None", {"score_mod": 2}),
        (NotImplementedError, r"^mask_mod is a BlockMask, which lists", {"mask_mod": BLOCKS}),
        (
            NotImplementedError,
            r"^the captured tensor number 0, of shape",
            {"score_mod": learnt},
        ),
        (ModError, r"^mask_mod .* cannot be recorded", {"mask_mod": lambda b, h, q, k: bool(q < k)}),
        (ValueError, r"^sinks has shape \(3,\); it must be \(2,\)", {"sinks": torch.zeros(3)}),
    ],
)
def test_a_bad_argument_is_named(error: type[Exception], message: str, options: dict[str, object]) -> None:
    arguments: dict[str, object] = {"layout": LAYOUT, **options}
    with pytest.raises(error, match=message):
        cp.attention(rows(), rows(), rows(), **arguments)  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_a_second_derivative_is_refused(method: Any) -> None:
    q, k, v = (rows().requires_grad_() for _ in range(3))
    out = cp.attention(q, k, v, layout=LAYOUT, method=method)
    assert isinstance(out, Tensor)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    (wanted,) = torch.autograd.grad(cp.attention(q, k, v, layout=LAYOUT, method=method).sum(), q)  # type: ignore[union-attr]
    assert torch.equal(dq, wanted)
    with pytest.raises(NotImplementedError, match="a gradient of attention's gradients is wanted"):
        torch.autograd.grad(dq.square().sum(), (q, k), allow_unused=True)


@pytest.mark.usefixtures("alone")
def test_gradients_of_torch_func_are_refused() -> None:
    def loss(q: Tensor) -> Tensor:
        return cp.attention(q, rows(), rows(), layout=LAYOUT).sum()  # type: ignore[union-attr]

    with pytest.raises(NotImplementedError, match=r"^q is one of the tensors of torch.func, and attention"):
        torch.func.grad(loss)(rows())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("method", ["all_gather", "ring", "ulysses"])
def test_no_heads_have_empty_gradients(method: Any) -> None:
    q, k, v = (rows(heads=0).requires_grad_() for _ in range(3))
    out = cp.attention(q, k, v, layout=LAYOUT, method=method)
    assert isinstance(out, Tensor)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [tuple(x.shape) for x in grads] == [(1, 8, 0, 16)] * 3


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((rows(), None), TypeError, r"^layout is None; it must be a Layout"),
        (([1], LAYOUT), TypeError, r"^x is \[1\]; it must be a tensor"),
        ((rows(), LAYOUT, None, 1.0), TypeError, r"^dim is 1.0; it must be an int"),
        ((rows(), Layout.zigzag(8, 2)), ValueError, r"^layout has 2 ranks and the group 1"),
    ],
)
def test_what_gather_does_not_take_is_named(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cp.gather(*arguments)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, r"^batch is -1; it must be an int, at least 0", {"batch": -1}),
        (TypeError, r"^n_heads is '2'; it must be an int", {"n_heads": "2"}),
        (TypeError, r"^rates is 3; it must be Rates, or None", {"rates": 3}),
    ],
)
def test_what_is_not_explained_is_named(
    error: type[Exception], message: str, options: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"layout": LAYOUT, "n_heads": 2, "n_heads_kv": 2, "d_head": 16}
    with pytest.raises(error, match=message):
        cp.explain_method(**{**given, **options})


def test_rates_are_above_zero() -> None:
    with pytest.raises(ValueError, match=r"^Rates' flops is 0.0; it must be a finite number, above 0"):
        cp.Rates(flops=0)
    with pytest.raises(ValueError, match=r"^Rates' latency is -1.0; it must be a finite number, at least 0"):
        cp.Rates(latency=-1)
