"""What a kernel with a mod is told of captured numbers and tensors, by a kernel that writes it down."""

from __future__ import annotations

import ctypes
import struct

import pytest
from echo_kernel import compile_library

from flash_helpers.kernel_configs import PLAIN, DType, FlashForwardKernelConfig
from flash_helpers.kernels.arguments import ModArguments
from flash_helpers.kernels.launch_features import Features

binding = pytest.importorskip("flash_attention_kernels")

DIGEST = 0xFEDC_BA98_7654_3210
ECHO = """
#include <cstring>
#include "flash_attention.cuh"
namespace {
constexpr FlashForwardKernelConfig config{DType::FP16, 64, 2, 1, 1};
constexpr flash::ForwardKernelRecord<FlashForwardKernelConfig> record(flash::ModSignature mod) {
    return {
        config, ForwardTraits{}, 1, 32, 0,
        [] { return 0; },
        [](const flash::ForwardProblem &problem, void *) {
            if (problem.mod == nullptr) return 7;
            char *out = static_cast<char *>(problem.o);
            const auto add = [&](const auto &value) {
                std::memcpy(out, &value, sizeof value);
                out += sizeof value;
            };
            add(problem.mod->numbers[0].whole);
            add(problem.mod->numbers[1].real);
            for (int i = 0; i < 2; ++i) {
                const flash::CapturedTensor &tensor = problem.mod->tensors[i];
                add(tensor.data);
                for (int axis = 0; axis < 5; ++axis) add(tensor.strides[axis]);
                for (int axis = 0; axis < 5; ++axis) add(int64_t(tensor.sizes[axis]));
            }
            return 0;
        },
        [](flash::KernelAttributes &) { return 0; },
        mod,
    };
}
constexpr auto plain = record({}), with_mod = record({0xfedcba9876543210, 2, 2});
constexpr const void *records[] = {&plain, &with_mod};
}
extern "C" const flash::KernelLibrary *flash_attention_kernel_library() {
    static constexpr flash::KernelLibrary library{flash::kAbiVersion, "ampere", "forward", 2, records,
                                                  [](int) { return "told to fail"; }};
    return &library;
}
"""
CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 2, 1, 1, False, False, False, 0, 0, 0, False, False)
ADDRESS = 1 << 40
SHAPES = ((2, 3, 8, 64), (2, 5, 4, 64), *((4096, 512, 64, 1),) * 4)
GIVEN = ModArguments(
    (-(2**40), 0.1),
    ((ADDRESS, (40, 0, 2, 3, 1), (1, 2, 3, 4, 5)), (0, (), ())),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory):
    assert binding.load_library(str(compile_library(tmp_path_factory.mktemp("mods"), ECHO))) == 2
    return binding.find(CONFIG, PLAIN, 1), binding.find(CONFIG, PLAIN, 1, DIGEST)


def launch(kernel, *mod, out=None):
    o = ctypes.create_string_buffer(512) if out is None else out
    kernel.launch(
        ADDRESS, ADDRESS, ADDRESS, ctypes.addressof(o), 0, 0, *SHAPES, 0.125, Features(d_head_v=64), *mod
    )
    return o


def test_kernels_are_told_apart_by_their_mods(kernels) -> None:
    plain, with_mod = kernels
    assert plain is not None
    assert with_mod is not None
    assert binding.find(CONFIG, PLAIN, 1, DIGEST + 1) is None
    listed = [entry for entry in binding.registered() if entry[1]["B_r"] == 2 and entry[3] == 1]
    assert len(listed) == 1  # the one without


def test_a_launch_passes_numbers_and_tensors(kernels) -> None:
    given = GIVEN._replace(tensors=(GIVEN.tensors[0], (ADDRESS + 8, (), ())))
    out = launch(kernels[1], given)
    found = struct.unpack("=qd" + 2 * "Q5q5q", out.raw[: 16 + 2 * 88])
    assert found[:2] == (-(2**40), 0.1)
    assert found[2:13] == (ADDRESS, 40, 0, 2, 3, 1, 1, 2, 3, 4, 5)
    assert found[13:] == (ADDRESS + 8, *(0,) * 10)


@pytest.mark.parametrize(
    ("mod", "what"),
    [
        ((), "mod is missing"),
        ((None,), "2 numbers and 2 tensors"),
        ((GIVEN._replace(numbers=(1,)),), "2 numbers and 2 tensors"),
        ((GIVEN._replace(tensors=GIVEN.tensors[:1]),), "2 numbers and 2 tensors"),
        ((GIVEN._replace(numbers=(1, "2")),), "a captured number is '2'"),
        ((GIVEN._replace(numbers=(1, True)),), "a captured number is True"),
        ((GIVEN._replace(tensors=(GIVEN.tensors[0], 5)),), "a captured tensor is 5"),
        ((GIVEN._replace(tensors=(GIVEN.tensors[0], (ADDRESS, (1,), ()))),), "as many"),
        ((GIVEN._replace(tensors=(GIVEN.tensors[0], (ADDRESS, (1,) * 6, (1,) * 6))),), "at most 5"),
        ((GIVEN,), "a captured tensor holds elements and is at address"),
    ],
)
def test_what_does_not_fit_the_mod_is_refused(kernels, mod, what: str) -> None:
    with pytest.raises((TypeError, ValueError), match=what):
        launch(kernels[1], *mod)


def test_a_kernel_without_a_mod_is_told_of_none(kernels) -> None:
    with pytest.raises(TypeError, match="compiled without one"):
        launch(kernels[0], GIVEN)
    with pytest.raises(binding.CudaError, match="told to fail"):  # problem.mod is nullptr
        launch(kernels[0])
