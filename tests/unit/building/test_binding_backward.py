"""A launch of a backward kernel: every argument arrives, workspaces have their sizes, nonsense is refused."""

from __future__ import annotations

import ctypes
from pathlib import Path

import flash_attention_kernels as binding
import pytest
from echo_kernel import Strides, compile_library

from flash_helpers.build.instantiations import kernel_source, table_source
from flash_helpers.kernels.arguments import UNBOUNDED, BackwardArguments
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.problem import BACKWARD
from flash_helpers.kernels.traits import BackwardTraits

pytestmark = pytest.mark.compile

KERNEL = directions(BACKWARD)[0].built()[0]
ADDRESSES = ("q", "k", "v", "o", "dout", "lse", "dlse", "dq", "dk", "dv")
STRIDES = tuple(f"{name}_strides" for name in ("q", "k", "v", "o", "dout", "dq", "dk", "dv"))
SIZES = ("batch", "n_heads", "n_heads_kv", "seq_len_q", "seq_len_k", "d_head", "d_head_v")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
WORKSPACES = ("delta", "lse_log2", "dq_sums", "counters")

ECHO = """
#include <cstring>
#include "backward.cuh"
namespace {
constexpr CONFIG_TYPE config = CONFIG;
constexpr flash::BackwardKernelRecord<CONFIG_TYPE> record{
    config, BackwardTraits{.padded_head = true}, 1, 32, 0,
    [] { return 0; },
    [](const flash::BackwardProblem &problem, void *stream) {
        if (problem.softmax_scale == 0) return 1;  // so that a launch can fail
        std::memcpy(problem.dq, &problem, sizeof problem);
        std::memcpy(static_cast<char *>(problem.dq) + sizeof problem, &stream, sizeof stream);
        return 0;
    },
    [](flash::KernelAttributes &out) { out = {}; return 0; },
    [](const flash::BackwardProblem &p) {
        return flash::BackwardWorkspaces{p.seq_len_q, 4 * p.seq_len_k, p.dq == nullptr ? 0 : 8};
    },
};
constexpr const void *records[] = {&record};
}
extern "C" const flash::KernelLibrary *flash_attention_kernel_library() {
    static constexpr flash::KernelLibrary library{flash::kAbiVersion, "ampere", "backward", 1, records,
                                                  [](int) { return "told to fail"; }};
    return &library;
}
"""


class Problem(ctypes.Structure):
    """flash::BackwardProblem, and the stream that came with it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ADDRESSES),
        *((name, Strides) for name in STRIDES),
        *((name, ctypes.c_int) for name in SIZES),
        ("softmax_scale", ctypes.c_float),
        ("window_left", ctypes.c_int),
        ("window_right", ctypes.c_int),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in OFFSETS),
        ("total_q", ctypes.c_int64),
        ("total_k", ctypes.c_int64),
        ("mod", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in WORKSPACES),
        ("stream", ctypes.c_void_p),
    )


def find_backward_echo(folder: Path):
    """A backward kernel that runs on the host and writes what it was given to dq."""
    config = KERNEL.config
    text = ECHO.replace("CONFIG_TYPE", type(config).__name__).replace("CONFIG", config.to_cpp_struct())
    binding.load_library(str(compile_library(folder, text)))
    found = binding.find(config, BackwardTraits(padded_head=True), 1)
    assert (found.family, found.direction) == ("ampere", "backward")
    return found


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory):
    return find_backward_echo(tmp_path_factory.mktemp("echo"))


def arguments(seen: Problem, **changes) -> BackwardArguments:
    values = {name: (1 << 44) + n for n, name in enumerate((*ADDRESSES, *OFFSETS))}
    values |= {name: (n, 10 + n, 20 + n, 1) for n, name in enumerate(STRIDES)}
    d_head, d_head_v = KERNEL.config.d_head, KERNEL.config.d_head_v
    values |= dict(zip(SIZES, (2, 6, 3, 50, 70, d_head, d_head_v), strict=True))
    values |= {"softmax_scale": 0.25, "window_left": -3, "window_right": UNBOUNDED, "softcap": 2.0}
    values |= {"total_q": 1 << 40, "total_k": 99, "dq": ctypes.addressof(seen)}
    return BackwardArguments(**values | changes)


def launch(kernel, given: BackwardArguments) -> None:
    kernel.launch_backward(given, 1 << 45, *((1 << 46) + n for n in range(4)))


def test_every_argument_arrives(echo) -> None:
    seen = Problem()
    given = arguments(seen)
    launch(echo, given)
    for name, value in given._asdict().items():
        found = getattr(seen, name)
        if name in STRIDES:
            found = (found.batch, found.seq, found.head, 1)
        assert found == value, name
    assert [getattr(seen, name) for name in WORKSPACES] == [(1 << 46) + n for n in range(4)]
    assert seen.stream == 1 << 45


def test_workspaces_are_those_of_the_problem(echo) -> None:
    assert echo.workspaces(arguments(Problem())) == (50, 280, 8)
    assert echo.workspaces(arguments(Problem(), dq=0)) == (50, 280, 0)


def test_smaller_heads_fit_a_kernel_that_reads_beyond_them(echo) -> None:
    seen = Problem()
    launch(echo, arguments(seen, d_head=8, d_head_v=16))
    assert (seen.d_head, seen.d_head_v) == (8, 16)


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"d_head": 4096}, ValueError, "head sizes 4096 and"),
        ({"batch": -1}, ValueError, "a size is -1; allowed: 0 or more"),
        ({"n_heads": 7}, ValueError, "n_heads 7 is no multiple of n_heads_kv 3"),
        ({"seq_len_k": 1 << 31}, ValueError, "seq_len_k is 2147483648; allowed: 32 bits"),
        ({"k": 0}, ValueError, "k holds elements and is at address"),
        ({"dv": 16}, ValueError, "dv holds elements and is at address"),
        ({"dout_strides": (1, 2, 3)}, TypeError, "dout_strides is no tuple of 4 integers"),
        ({"q": "pointer"}, TypeError, "integer"),
        ({"softcap": "1"}, TypeError, "must be real number, not str"),
    ],
)
def test_nonsense_is_refused(echo, changes, error, reason) -> None:
    with pytest.raises(error, match=reason):
        launch(echo, arguments(Problem(), **changes))


def test_other_arguments_are_refused(echo) -> None:
    for given in ((), (1, 2), tuple(arguments(Problem()))[:-1]):
        with pytest.raises(TypeError, match="arguments must be a BackwardArguments of"):
            echo.workspaces(given)
    with pytest.raises(TypeError, match="given 2 arguments; wanted launch_backward"):
        echo.launch_backward(arguments(Problem()), 0)
    with pytest.raises(ValueError, match="dq_sums holds elements and is at address"):
        echo.launch_backward(arguments(Problem()), 0, 1 << 46, 1 << 46, 0, 1 << 46)


def test_a_failed_launch_says_why(echo) -> None:
    with pytest.raises(binding.CudaError, match="launch_backward: told to fail"):
        launch(echo, arguments(Problem(), softmax_scale=0))


def test_a_kernel_has_the_launch_of_its_direction_alone(echo) -> None:
    with pytest.raises(TypeError, match="launch: this is a kernel of the direction 'backward'"):
        echo.launch(1)


def test_gradients_that_are_not_wanted_have_no_address(echo) -> None:
    seen = Problem()
    launch(echo, arguments(seen, dk=0, dv=0, dlse=0))
    assert (seen.dk, seen.dv, seen.dlse) == (None, None, None)


def test_a_generated_unit_defines_a_record_of_the_direction() -> None:
    name = type(KERNEL.config).__name__
    source, table = kernel_source(KERNEL, 80), table_source([KERNEL])
    assert '#include "ampere/backward/launcher.cuh"' in source
    assert f"constinit const flash::BackwardKernelRecord<{name}> kernel_" in source
    assert f"flash::ampere::make_backward_record<{name}{{" in source
    assert '#include "backward.cuh"' in table
    assert 'kDirection = "backward"' in table
