"""Backward passes made before, by a table in C++: every pointer from its tensor, what is no such pass."""

from __future__ import annotations

import ctypes
import functools

import flash_attention_kernels as binding
import pytest
import torch
from test_binding_backward import ADDRESSES, KERNEL, STRIDES, Problem, find_backward_echo

from flash_helpers.kernels.arguments import BackwardArguments

pytestmark = pytest.mark.compile

BATCH, QUERIES, KEYS, HEADS, HEADS_KV, D = 2, 8, 10, 4, 2, 40
DTYPE = KERNEL.config.dtype.to_torch_dtype()
WORKSPACE = 4096
GIVEN = ("q", "k", "v", "o", "lse", "dout", "dlse")


@pytest.fixture(scope="module")
def backward_echo(tmp_path_factory: pytest.TempPathFactory):
    return find_backward_echo(tmp_path_factory.mktemp("echo"))


def given(packed: bool = False, lse_gradient: bool = True) -> list:
    """What a table is called with: dense, or two packed sequences."""
    queries, keys = (QUERIES, HEADS, D), (KEYS, HEADS_KV, D)
    rows = (HEADS, QUERIES) if packed else (BATCH, HEADS, QUERIES)
    batch = () if packed else (BATCH,)
    q, o, dout = (torch.zeros(*batch, *queries, dtype=DTYPE) for _ in range(3))
    k, v = (torch.zeros(*batch, *keys, dtype=DTYPE) for _ in range(2))
    lse, dlse = torch.zeros(rows), torch.zeros(rows) if lse_gradient else None
    tensors = [q, k, v, o, lse, dout, dlse]
    if packed:
        ends = torch.zeros(3, dtype=torch.int32)
        tensors += [ends, ends.clone(), None, None, None, QUERIES, KEYS]
    return tensors


def made_for(tensors: list, wanted: tuple[bool, bool, bool]) -> tuple:
    """dq, dk, dv and the workspace."""
    grads = [
        torch.zeros_like(x) if is_wanted else None for x, is_wanted in zip(tensors, wanted, strict=False)
    ]
    return (*grads, torch.zeros(WORKSPACE, dtype=torch.uint8))


def launch_arguments(tensors: list, made: tuple, **changes) -> tuple:
    """The arguments of ``launch_backward``."""
    q, k, v, o, lse, dout, dlse, *own = tensors
    like = dict(zip((*GIVEN, "dq", "dk", "dv"), (q, k, v, o, lse, dout, dlse, *made[:3]), strict=True))
    values = {name: 0 if x is None else x.data_ptr() for name, x in like.items()}
    for name in STRIDES:
        x = like[name.removesuffix("_strides")]
        values[name] = (0, 0, 0, 1) if x is None else (0, *x.stride())[-4:]
    values |= {"batch": BATCH, "n_heads": HEADS, "n_heads_kv": HEADS_KV, "seq_len_q": QUERIES}
    values |= {"seq_len_k": KEYS, "d_head": D, "d_head_v": D, "softmax_scale": 0.5}
    if own:
        values |= {"cu_seqlens_q": own[0].data_ptr(), "cu_seqlens_k": own[1].data_ptr()}
        values |= {"total_q": QUERIES, "total_k": KEYS}
    begin = made[3].data_ptr()
    return BackwardArguments(**values | changes), 7, begin, begin + 1024, begin + 2048, begin + 3072


def makers(made: tuple) -> tuple:
    return tuple(None if x is None else functools.partial(torch.zeros, x.shape, dtype=x.dtype) for x in made)


def remembered(kernel, tensors: list, wanted=(True, True, True), device: int = 0):
    table, made = binding.BackwardCallTable(), made_for(tensors, wanted)
    launch = launch_arguments(tensors, made)
    assert table.remember(
        tuple(tensors), made, makers(made), kernel.launch_backward, launch, device, "kernel"
    )
    return table


def seen(dq: torch.Tensor) -> Problem:
    return Problem.from_buffer_copy(ctypes.string_at(dq.data_ptr(), ctypes.sizeof(Problem)))


@pytest.mark.parametrize("packed", [False, True])
def test_every_pointer_comes_from_its_tensor(devices, backward_echo, packed: bool) -> None:
    table, again = remembered(backward_echo, given(packed), device=3), given(packed)
    dq, dk, dv, workspace = table(*again)
    problem = seen(dq)
    pointers = dict(zip((*GIVEN, "dq", "dk", "dv"), (*again[:7], dq, dk, dv), strict=True))
    assert {name: getattr(problem, name) for name in ADDRESSES} == {
        name: pointers[name].data_ptr() for name in ADDRESSES
    }
    begin = workspace.data_ptr()
    places = [getattr(problem, name) - begin for name in ("delta", "lse_log2", "dq_sums", "counters")]
    assert places == [0, 1024, 2048, 3072]
    offsets = [x.data_ptr() for x in again[7:9]] if packed else [None, None]
    assert [problem.cu_seqlens_q, problem.cu_seqlens_k] == offsets
    assert (problem.seqused_q, problem.seqused_k) == (None, None)
    assert (problem.batch, problem.seq_len_k, problem.softmax_scale) == (BATCH, KEYS, 0.5)
    assert (dq.shape, dk.shape, dv.dtype, workspace.numel()) == (again[0].shape, again[1].shape, DTYPE, 4096)
    assert (devices.entered, devices.current) == ([3, 0], 0)
    assert problem.stream in (1003, None)  # DLPack's functions know no stream where torch has no CUDA
    assert table.last == "kernel"


def test_offsets_that_nobody_gives_are_kept(devices, backward_echo) -> None:
    """They were found from a captured tensor, which the kernel does not read."""
    document, ends = torch.arange(QUERIES) // 3, torch.zeros(3, dtype=torch.int32)
    tensors, made = given(), made_for(given(), (True, True, True))
    changes = {"cu_seqlens_q": ends.data_ptr(), "cu_seqlens_k": ends.data_ptr()}
    launch = launch_arguments(tensors, made, **changes)
    called = (*tensors, *(None,) * 5, (0,), document)
    table = binding.BackwardCallTable()
    told = called, made, makers(made), backward_echo.launch_backward, launch, 0, "kernel"
    assert not table.remember(*told)
    assert table.remember(*told, ends)
    again = (*given(), *called[7:])
    problem = seen(table(*again)[0])
    assert (problem.cu_seqlens_q, problem.cu_seqlens_k) == (ends.data_ptr(),) * 2
    document[1] = 7
    assert table(*again) is None


def test_only_what_is_wanted_is_made(devices, backward_echo) -> None:
    table = remembered(backward_echo, given(), (True, False, True))
    dq, dk, dv, _ = table(*given())
    assert dk is None
    problem = seen(dq)
    assert (problem.dk, problem.dv) == (None, dv.data_ptr())


def test_without_a_gradient_of_the_lse(devices, backward_echo) -> None:
    table = remembered(backward_echo, given(lse_gradient=False))
    dq, *_ = table(*given(lse_gradient=False))
    assert seen(dq).dlse is None
    assert table(*given()[:7]) is None
    assert table(*given(lse_gradient=False)[:6]) is not None  # what is left out is None


def misaligned(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x.flatten(), x.new_zeros(1)))[1:].view(x.shape)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[..., :1],
        lambda x: x.double(),
        lambda x: x.transpose(-1, -2),
        misaligned,
        torch._neg_view,
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        lambda x: x.to("meta"),
        lambda x: x.numpy() if x.dtype is not torch.bfloat16 else "array",
        lambda x: x[:1].expand(x.shape),
    ],
)
@pytest.mark.parametrize("place", range(7))
def test_another_tensor_is_another_pass(devices, backward_echo, change, place: int) -> None:
    table, other = remembered(backward_echo, given()), given()
    other[place] = change(other[place])
    assert table(*other) is None
    assert table(*given()) is not None


@pytest.mark.parametrize("place", range(7))
def test_what_lost_its_memory_goes_the_long_way(devices, backward_echo, place: int) -> None:
    table, other = remembered(backward_echo, given()), given()
    other[place].untyped_storage().resize_(0)
    assert table(*other) is None


def test_inputs_want_gradients_while_none_are_recorded(devices, backward_echo) -> None:
    table, again = remembered(backward_echo, given()), given()
    again[0].requires_grad_()
    with torch.no_grad():
        assert table(*again) is not None
    assert table(*again) is None  # somebody differentiates what this computes


@pytest.mark.parametrize("place", [0, 3, 5, 6])
def test_a_launch_on_a_copy_is_not_remembered(devices, backward_echo, place: int) -> None:
    """As where a gradient was converted, or its rows were brought where a kernel reaches them."""
    table, tensors = binding.BackwardCallTable(), given()
    made = made_for(tensors, (True, True, True))
    copied = [x.clone() if i == place else x for i, x in enumerate(tensors)]
    launch = launch_arguments(copied, made)
    assert not table.remember(
        tuple(tensors), made, makers(made), backward_echo.launch_backward, launch, 0, ""
    )
    copy = (made[0].clone(), *made[1:])
    launch = launch_arguments(tensors, copy)
    assert not table.remember(
        tuple(tensors), made, makers(made), backward_echo.launch_backward, launch, 0, ""
    )
    assert len(table) == 0


def test_a_failed_launch_goes_the_long_way(devices, backward_echo) -> None:
    table, tensors = binding.BackwardCallTable(), given()
    made = made_for(tensors, (True, True, True))
    launch = launch_arguments(tensors, made, softmax_scale=0.0)
    assert table.remember(tuple(tensors), made, makers(made), backward_echo.launch_backward, launch, 0, "")
    assert table(*given()) is None


def test_nonsense_is_refused(devices, backward_echo, echo) -> None:
    table, tensors = binding.BackwardCallTable(), given()
    made = made_for(tensors, (True, True, True))
    launch = launch_arguments(tensors, made)
    with pytest.raises(TypeError, match="tuples of 4: dq, dk, dv, workspace"):
        table.remember(
            tuple(tensors), made[:3], makers(made)[:3], backward_echo.launch_backward, launch, 0, ""
        )
    for function in (echo.launch, backward_echo.workspaces, print):
        with pytest.raises(TypeError, match="not the launch of a Kernel"):
            table.remember(tuple(tensors), made, makers(made), function, launch, 0, "")
    with pytest.raises(TypeError, match="a BackwardCallTable is made empty"):
        binding.BackwardCallTable(1)
    for wrong in ([], given()[:5], [*given(), *[None] * 8]):
        assert table(*wrong) is None
