"""What the binding does with what is broken: libraries, fields, pointers; and that it keeps nothing."""

import contextlib
import gc
import os
import subprocess
import sys
from enum import IntEnum
from pathlib import Path

import flash_attention_kernels as binding
import pytest
from binding_arguments import CONFIG, FIELDS, STRIDE, launch_arguments, lookalike
from echo_kernel import Problem, compile_library

from flash_attention.backends import cuda
from flash_helpers.kernel_configs import PLAIN

pytestmark = pytest.mark.compile

# ---------------------------------------------------------------- libraries
LIBRARY = """
#include "flash_attention.cuh"
namespace {
int load() { return 0; }
int launch(const flash::ForwardProblem &, void *) { return 0; }
int attributes(flash::KernelAttributes &) { return 0; }
const char *text(int) { return nullptr; }
using Record = flash::ForwardKernelRecord<FlashForwardKernelConfig>;
constexpr Record whole{{DType::FP16, 64, 2, 2, 2}, {}, 2, 32, 0, load, launch, attributes};
constexpr Record broken{{DType::FP16, 64, 3, 3, 3}, {}, 2, 32, 0, load, LAUNCH, attributes};
constexpr const void *records[] = {&whole, SECOND};
}
extern "C" const flash::KernelLibrary *flash_attention_kernel_library() {
    static constexpr flash::KernelLibrary library{
        flash::kAbiVersion, FAMILY, DIRECTION, COUNT, RECORDS, TEXT};
    return RETURNED;
}
"""
WHOLE = {
    "LAUNCH": "launch",
    "SECOND": "&broken",
    "FAMILY": '"ampere"',
    "DIRECTION": '"forward"',
    "COUNT": "2",
    "RECORDS": "records",
    "TEXT": "text",
    "RETURNED": "&library",
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"RETURNED": "nullptr"}, r"its flash_attention_kernel_library\(\) returns NULL"),
        ({"FAMILY": "nullptr"}, "names no kernel family"),
        ({"DIRECTION": "nullptr"}, "names no kernel family or no direction"),
        ({"DIRECTION": '"sideways"'}, "family 'ampere', direction 'sideways', are unknown"),
        ({"RECORDS": "nullptr"}, "announces 2 kernels without records"),
        ({"TEXT": "nullptr"}, "without texts of errors"),
        ({"COUNT": "-1"}, "announces -1 kernels"),
        ({"SECOND": "nullptr"}, "record 1 of 2 is empty or lacks a function"),
        ({"LAUNCH": "nullptr"}, "record 1 of 2 is empty or lacks a function"),
    ],
)
def test_broken_library_is_refused_whole(tmp_path, change, reason):
    text = LIBRARY
    for name, value in (WHOLE | change).items():
        text = text.replace(name, value)
    library = compile_library(tmp_path, text)
    known = binding.registered()
    # In a process of its own: this must not be the end of the tests.
    program = f"import flash_attention_kernels as b; b.load_library({str(library)!r})"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1, run
    with pytest.raises(RuntimeError, match=f"{library}: .*{reason}"):
        binding.load_library(library)
    assert binding.registered() == known


def test_error_without_a_text(tmp_path):
    text = LIBRARY
    for name, value in (WHOLE | {"LAUNCH": "[](const auto &, void *) { return 7; }"}).items():
        text = text.replace(name, value)
    binding.load_library(compile_library(tmp_path, text))
    config = lookalike(dtype=CONFIG.dtype.FP16, B_r=3, B_c=3, n_warps=3)
    for name, value in FIELDS.items():
        if name not in ("dtype", "d_head", "B_r", "B_c", "n_warps"):
            setattr(config, name, type(value)(0))
    config.kv_stages = 1
    kernel = binding.find(config, PLAIN, 2)
    with pytest.raises(binding.CudaError, match=r"launch: unknown error \(cudaError 7\)"):
        kernel.launch(*launch_arguments())


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_paths_of_any_kind_and_any_bytes(tmp_path, kind):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.so")
    with pytest.raises(RuntimeError, match=r"cannot load the kernel library: .*No such file"):
        binding.load_library(kind(path))


def test_path_that_is_none():
    for wrong in (None, 1, "a\0b"):
        with pytest.raises((TypeError, ValueError)):
            binding.load_library(wrong)


def test_a_kernel_is_found_not_made(echo):
    with pytest.raises(TypeError, match=r"made by find\(config, traits, target\) alone"):
        type(echo)()


# ---------------------------------------------------------------- fields
def test_enumerator_that_no_number_holds():
    wrong = IntEnum("DType", {"FP16": 1 << 70})
    with pytest.raises(TypeError, match=r"\.dtype: given <DType.FP16: \d+> of type DType, wanted DType"):
        binding.find(lookalike(dtype=wrong.FP16), PLAIN, 80)


def test_error_of_a_field_is_the_error():
    config = lookalike(B_r=...)
    type(config).B_r = property(lambda self: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        binding.find(config, PLAIN, 80)


def test_value_that_cannot_be_shown():
    class Hidden:
        def __repr__(self):
            raise RecursionError("no end")

    with pytest.raises(RecursionError, match="no end"):
        binding.find(lookalike(B_r=Hidden()), PLAIN, 80)


# ---------------------------------------------------------------- arguments of a launch
class Asked:
    """A number that notes whether it was asked for."""

    def __init__(self):
        self.times = 0

    def __index__(self):
        self.times += 1
        return 1


@pytest.mark.parametrize(
    "changes", [{"q": "pointer"}, {"lse": 1.5}, {"q_stride": (1, None, 1, 1)}, {"q_shape": (2, 3, 4, "64")}]
)
def test_reading_ends_at_the_first_error(echo, changes):
    later = Asked()
    with pytest.raises(TypeError):
        echo.launch(*launch_arguments(o_stride=(later, 1, 1, 1), **changes))
    assert later.times == 0


def test_reading_features_ends_at_the_first_error(echo):
    later = Asked()
    with pytest.raises(TypeError):
        echo.launch(*launch_arguments(), cuda.Features(64, softcap="0", page_size=later))
    assert later.times == 0


@pytest.mark.parametrize("name", ["d_head_v", "window_left", "window_right", "n_splits", "page_size"])
def test_numbers_are_not_cut_to_32_bits(echo, name):
    features = cuda.Features(64)._replace(**{name: (1 << 32) + 64})
    with pytest.raises(ValueError, match=f"launch: {name} is 4294967360; allowed: 32 bits"):
        echo.launch(*launch_arguments(), features)


@pytest.mark.parametrize("name", ["q", "k", "v", "o"])
@pytest.mark.parametrize("address", [0, 20, 65535])
def test_tensors_without_memory_are_not_launched(echo, name, address):
    with pytest.raises(ValueError, match=rf"launch: {name} holds elements and is at address .*resized to 0"):
        echo.launch(*launch_arguments(**{name: address}))


def test_empty_tensors_need_no_memory(echo):
    import ctypes

    seen = Problem()
    empty = (2, 0, 4, 64)
    echo.launch(*launch_arguments(o=ctypes.addressof(seen), k=0, v=0, k_shape=empty))
    assert (seen.k, seen.v, seen.seq_len_k) == (None, None, 0)


# ---------------------------------------------------------------- references
class Label:
    pass


LABEL = Label()
ERRORS = (TypeError, AttributeError, ValueError, RuntimeError)
MISUSES = {
    "field": lambda echo: binding.find(lookalike(B_r=LABEL), PLAIN, 80),
    "config": lambda echo: binding.find(LABEL, PLAIN, 80),
    "traits": lambda echo: binding.find(lookalike(), LABEL, 80),
    "pointer": lambda echo: echo.launch(*launch_arguments(q=LABEL)),
    "null": lambda echo: echo.launch(*launch_arguments(q_shape=(2, 3, 4, 64), q=0)),
    "features": lambda echo: echo.launch(*launch_arguments(), LABEL),
    "library": lambda echo: binding.load_library("/nowhere/none.so"),
    "struct": lambda echo: binding.config_field_names("Nonsense"),
    "remember": lambda echo: binding.CallTable().remember(LABEL),
    "makers": lambda echo: binding.CallTable().remember(
        (LABEL,), (None,) * 3, (LABEL,) * 3, echo.launch, (LABEL,), 0, LABEL
    ),
    "table": lambda echo: binding.CallTable(LABEL),
    "kernel": lambda echo: type(echo)(LABEL),
}
USES = {
    "find": lambda echo: binding.find(CONFIG, PLAIN, 999),
    "launch": lambda echo: echo.launch,
    "registered": lambda echo: binding.registered(),
    "names": lambda echo: (
        binding.traits_field_names(),
        binding.config_field_names("FlashForwardKernelConfig"),
    ),
    "attributes": lambda echo: (echo.attributes(), echo.load(), echo.family, echo.direction, echo.target),
    "table": lambda echo: len(binding.CallTable()),
}


@pytest.mark.parametrize("use", [*MISUSES.items(), *USES.items()], ids=lambda use: use[0])
def test_no_call_keeps_or_loses_a_reference(echo, use):
    held = (LABEL, type(echo), binding.CallTable, CONFIG, STRIDE, PLAIN, echo, None, True, False)
    if use in MISUSES.items():
        with pytest.raises(ERRORS):
            use[1](echo)

    def repeat(times):
        for _ in range(times):
            with contextlib.suppress(ERRORS):
                use[1](echo)

    repeat(10)
    gc.collect()
    before = [sys.getrefcount(x) for x in held]
    repeat(1000)
    gc.collect()
    drift = [sys.getrefcount(x) - old for x, old in zip(held, before, strict=True)]
    assert all(abs(change) < 500 for change in drift), drift  # others hold None, too
