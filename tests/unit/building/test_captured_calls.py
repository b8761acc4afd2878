"""Calls with functions of the user's, made before: what a table in C++ notices of captured tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import flash_attention_kernels as binding
import pytest
import torch
from echo_kernel import compile_library
from told_calls import SCALE, SHAPE, inputs, maker
from torch.overrides import TorchFunctionMode

from flash_helpers.kernel_configs import PLAIN, DType, FlashForwardKernelConfig
from flash_helpers.kernels.arguments import ModArguments
from flash_helpers.kernels.launch_features import Features

pytestmark = pytest.mark.compile

DIGEST = 0x1357_9BDF_0246_8ACE
ECHO = """
#include <cstring>
#include "flash_attention.cuh"
namespace {
constexpr FlashForwardKernelConfig config{DType::FP16, 64, 3, 1, 1};
constexpr flash::ForwardKernelRecord<FlashForwardKernelConfig> record{
    config, ForwardTraits{}, 1, 32, 0,
    [] { return 0; },
    [](const flash::ForwardProblem &problem, void *) {
        const void *const seen[] = {problem.mod->tensors[0].data, problem.mod->tensors[1].data,
                                    problem.mod->tiles.words};
        std::memcpy(problem.o, seen, sizeof seen);
        return 0;
    },
    [](flash::KernelAttributes &) { return 0; },
    {0x13579bdf02468ace, 0, 2},
};
constexpr const void *records[] = {&record};
}
extern "C" const flash::KernelLibrary *flash_attention_kernel_library() {
    static constexpr flash::KernelLibrary library{flash::kAbiVersion, "ampere", "forward", 1, records,
                                                  [](int) { return "told to fail"; }};
    return &library;
}
"""
CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 3, 1, 1, False, False, False, 0, 0, 0, False, False)
NO_OTHERS = (None,) * 7  # out, sinks and the tensors of a layout


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    binding.load_library(str(compile_library(tmp_path_factory.mktemp("captured"), ECHO)))
    return binding.find(CONFIG, PLAIN, 1, DIGEST)


def captured() -> list[torch.Tensor]:
    return [torch.arange(8.0), torch.arange(12).view(3, 4)]


def remembered(
    kernel: Any, own: list[torch.Tensor], *contents: Any, words=None, workspace=None, kept=None
) -> Any:
    """A table that was told of one call with these captured tensors, or None: it does not take the call."""
    table, (q, k, v), o = binding.CallTable(), inputs(), torch.empty(SHAPE, dtype=torch.float16)
    tiles = None if words is None else (words.data_ptr(), 0, 0, 1)
    mod = ModArguments((), tuple((x.data_ptr(), x.stride(), tuple(x.shape)) for x in own), tiles)
    addresses = (*(x.data_ptr() for x in (q, k, v, o)), 0, 0)
    arguments = (*addresses, q.shape, k.shape, *(x.stride() for x in (q, k, v, o)), SCALE, Features(64), mod)
    makers = maker(SHAPE), None, None if workspace is None else maker(workspace.shape, workspace.dtype)
    told = (q, k, v, *NO_OTHERS, *contents, *own), (o, None, workspace), makers
    is_taken = table.remember(*told, kernel.launch, arguments, 0, "label", *(() if kept is None else (kept,)))
    return table if is_taken else None


def call(table: Any, own: list[Any], *contents: Any) -> Any:
    return table.call(*inputs(), *NO_OTHERS, *contents, *own)


def seen(o: torch.Tensor) -> list[int]:
    return list((ctypes.c_uint64 * 3).from_address(o.data_ptr()))


def test_captured_tensors_may_lie_elsewhere(devices, kernel) -> None:
    table, own = remembered(kernel, captured()), captured()
    assert seen(call(table, own)) == [own[0].data_ptr(), own[1].data_ptr(), 0]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x.int(),
        lambda x: x[:7],
        lambda x: x.view(2, 4),
        lambda x: torch.arange(16.0)[::2],
        lambda x: x.clone().requires_grad_(),
        torch._neg_view,
        lambda x: x.to("meta"),
        lambda x: None,
        lambda x: x.tolist(),
    ],
)
def test_other_captured_tensors_are_another_call(devices, kernel, change) -> None:
    table, own = remembered(kernel, captured()), captured()
    assert call(table, [change(own[0]), own[1]]) is None
    assert call(table, own[::-1]) is None
    assert call(table, own[:1]) is None
    assert call(table, own) is not None


def test_a_parameter_is_a_captured_tensor(devices, kernel) -> None:
    table, own = remembered(kernel, captured()), captured()
    learnt = [torch.nn.Parameter(own[0]), own[1]]
    assert call(table, learnt) is None  # its gradient is wanted
    with torch.no_grad():
        assert seen(call(table, learnt))[0] == own[0].data_ptr()
    assert call(table, [torch.nn.UninitializedParameter(), own[1]]) is None
    with torch.no_grad():
        assert remembered(kernel, learnt) is not None


# ---------------------------------------------------------------------- what was found from contents
def write(x: torch.Tensor) -> None:
    x.add_(1)


def write_a_part(x: torch.Tensor) -> None:
    x[2:3].zero_()


def take_other_memory(x: torch.Tensor) -> None:
    version = x._version
    x.set_(torch.arange(8.0))
    torch._C._autograd._unsafe_set_version_counter((x,), (version,))


@pytest.mark.parametrize("change", [write, write_a_part, take_other_memory])
def test_contents_that_changed_are_noticed_where_they_count(devices, kernel, change) -> None:
    own = captured()
    table, other = remembered(kernel, own, (0,)), remembered(kernel, own, (1,))
    for _ in range(2):
        assert call(table, own, (0,)) is not None
    change(own[0])
    assert call(table, own, (0,)) is None
    assert call(other, own, (1,)) is not None  # of this one the first tensor's contents do not count
    write(own[1])
    assert call(other, own, (1,)) is None


def test_equal_contents_elsewhere_are_others(devices, kernel) -> None:
    own = captured()
    table = remembered(kernel, own, (0, 1))
    assert call(table, captured(), (0, 1)) is None
    assert call(table, own, (0, 1)) is not None
    assert call(table, own, (0,)) is None
    assert call(table, own) is None


def test_what_was_found_is_of_one_stream_and_of_no_graph(devices, kernel, monkeypatch) -> None:
    own = captured()
    table = remembered(kernel, own, ())
    assert call(table, own, ()) is not None
    devices.capturing = True
    assert call(table, own, ()) is None
    assert call(remembered(kernel, own), own) is not None  # nothing was found of it
    devices.capturing = False
    assert call(table, own, ()) is not None
    monkeypatch.setattr(type(devices), "stream", lambda self, index: 77)
    devices.read_tensors(None)
    assert call(table, own, ()) is None


@pytest.mark.parametrize(("stream", "asked"), [(0, 0), (1, 0), (2, 1), (77, 1)])
def test_the_default_stream_is_in_no_graph(devices, kernel, monkeypatch, stream, asked) -> None:
    """CUDA captures no work of it, and the question takes half a microsecond."""
    monkeypatch.setattr(type(devices), "stream", lambda self, index: stream)
    devices.read_tensors(None)
    own = captured()
    table, devices.questions = remembered(kernel, own, ()), 0
    assert call(table, own, ()) is not None
    assert devices.questions == asked


def test_a_tensor_without_a_version_is_not_remembered(devices, kernel) -> None:
    with torch.inference_mode():
        own = captured()
    assert remembered(kernel, own, (0,)) is None
    table = remembered(kernel, own)
    assert call(table, own) is not None
    assert call(table, own, (0,)) is None


@pytest.mark.parametrize("places", [(2,), (-1,), (0, 1, 2), tuple(range(9))])
def test_places_that_are_none(devices, kernel, places) -> None:
    assert remembered(kernel, captured(), places) is None


# ---------------------------------------------------------------------- bits of tiles
def test_bits_are_kept_or_lie_in_the_workspace(devices, kernel) -> None:
    words, own = torch.zeros(64, dtype=torch.int32), captured()
    assert remembered(kernel, own, words=words) is None  # nobody keeps them
    table = remembered(kernel, own, words=words, kept=words)
    assert seen(call(table, own))[2] == words.data_ptr()
    workspace = torch.zeros(256, dtype=torch.uint8)
    assert remembered(kernel, own, words=words, workspace=workspace) is None
    assert remembered(kernel, own, words=workspace[128:], workspace=workspace) is not None


def test_bits_in_the_workspace_go_with_it(devices, kernel, monkeypatch) -> None:
    workspace, made, own = torch.zeros(256, dtype=torch.uint8), [], captured()

    def new_workspace() -> torch.Tensor:
        made.append(torch.zeros(256, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setitem(globals(), "maker", lambda shape, dtype=torch.float16: (
        new_workspace if dtype is torch.uint8 else lambda: torch.zeros(shape, dtype=dtype)
    ))  # fmt: skip
    table = remembered(kernel, own, words=workspace[128:], workspace=workspace)
    for n in (1, 2):
        found = seen(call(table, own))[2]
        assert len(made) == n
        assert found == made[-1].data_ptr() + 128


# ---------------------------------------------------------------------- who hears of it
class Heard(TorchFunctionMode):
    """Counts what functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(function)
        return function(*args, **kwargs or {})


def test_function_modes_do_not_hear_what_tensors_are_asked(devices, kernel) -> None:
    own = captured()
    table, given = remembered(kernel, own, (0,)), (*inputs(), *NO_OTHERS, (0,), *own)
    with Heard() as mode:
        assert table.call(*given) is not None
        assert mode.calls == [torch.empty]  # the maker's call
        mode.calls.clear()
        assert table.call(*inputs(), *NO_OTHERS, (0,), "text", own[1]) is None
        torch.ones(3)
        assert mode.calls == [*(torch.zeros,) * 3, torch.ones]  # of `inputs`; it is heard again afterwards
