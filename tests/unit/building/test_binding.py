"""The extension: fields read one by one, the registry, libraries without a GPU, a launch's arguments."""

import ctypes
import dataclasses
import subprocess
from enum import IntEnum

import flash_attention_kernels as binding
import pytest
from binding_arguments import CONFIG, FIELDS, launch_arguments, lookalike
from echo_kernel import Problem, compile_library

from flash_attention.backends import cuda
from flash_helpers.build import KernelCache, build_kernels
from flash_helpers.kernel_configs import (
    PLAIN,
    BackwardTraits,
    DType,
    ForwardKernel,
    ForwardTraits,
    HopperForwardKernelConfig,
)
from flash_helpers.kernels.arguments import BackwardArguments
from flash_helpers.kernels.families import DIRECTIONS

pytestmark = pytest.mark.compile


# ---------------------------------------------------------------- fields
@pytest.mark.parametrize("cls", [direction.config for direction in DIRECTIONS])
def test_the_reader_reads_the_fields_of_the_dataclass(cls):
    assert binding.config_field_names(cls.__name__) == [field.name for field in dataclasses.fields(cls)]


@pytest.mark.parametrize("cls", [ForwardTraits, BackwardTraits])
def test_the_reader_reads_the_fields_of_traits(cls):
    assert binding.traits_field_names(cls.__name__) == [field.name for field in dataclasses.fields(cls)]


def test_the_arguments_of_a_backward_launch_are_those_of_the_tuple():
    assert binding.backward_argument_names == BackwardArguments._fields


def test_unknown_struct():
    with pytest.raises(
        ValueError, match="no traits struct is called 'Nonsense'; known: ForwardTraits, BackwardTraits"
    ):
        binding.traits_field_names("Nonsense")
    with pytest.raises(ValueError, match="no configuration struct is called 'Nonsense'"):
        binding.config_field_names("Nonsense")


# ---------------------------------------------------------------- reading fields
def test_enumerations_of_the_hopper_family():
    reference = IntEnum("SoftmaxReference", {"EXACT": 0, "LAGGED": 2, "UNHEARD_OF": 7})
    next_item = IntEnum("NextItem", {"NONE": 0})
    kinds = {field.name: field.type for field in dataclasses.fields(HopperForwardKernelConfig)}
    values = {name: 64 if kind == "int" else True for name, kind in kinds.items()}
    values |= {"dtype": DType.FP16, "next_item": next_item.NONE}
    del values["softmax_reference"]

    def find(**changes):
        config = type("HopperForwardKernelConfig", (), values | changes)()
        return binding.find(config, PLAIN, 90)

    assert find(softmax_reference=reference.LAGGED) is None
    for wrong in (2, next_item.NONE, reference.UNHEARD_OF):
        with pytest.raises(TypeError, match=r"\.softmax_reference: given .*, wanted SoftmaxReference"):
            find(softmax_reference=wrong)


def test_not_loaded_is_none():
    assert binding.find(dataclasses.replace(CONFIG, n_warps=1), PLAIN, 80) is None
    assert binding.find(lookalike(), PLAIN, 999) is None


@pytest.mark.parametrize("name", FIELDS)
def test_missing_field_is_named(name):
    with pytest.raises(AttributeError, match=rf"FlashForwardKernelConfig\.{name}: .* has no such field"):
        binding.find(lookalike(**{name: ...}), PLAIN, 80)


@pytest.mark.parametrize("name", FIELDS)
def test_mistyped_field_is_named_with_both_types(name):
    kind = type(FIELDS[name]).__name__
    wrong = ["64", None, 1.0, [1]]
    wrong += {"int": [True, DType.FP16], "bool": [1, 0], "DType": [5, True], "SoftmaxReference": [0, True]}[
        kind
    ]
    for value in wrong:
        given = rf"given .* of type {type(value).__name__}, wanted {kind}"
        with pytest.raises(TypeError, match=rf"FlashForwardKernelConfig\.{name}: {given}"):
            binding.find(lookalike(**{name: value}), PLAIN, 80)


def test_number_that_no_int_holds():
    for value in (1 << 31, 1 << 70, -(1 << 40)):
        with pytest.raises(TypeError, match=r"\.B_r: given -?\d+ of type int, wanted int of 32 bits"):
            binding.find(lookalike(B_r=value), PLAIN, 80)


def test_traits_are_read_as_strictly():
    with pytest.raises(TypeError, match=r"ForwardTraits\.causal: given 1 of type int, wanted bool"):
        binding.find(CONFIG, dataclasses.replace(PLAIN, causal=1), 80)
    with pytest.raises(AttributeError, match=r"ForwardTraits\.causal: given an object of type str"):
        binding.find(CONFIG, "causal", 80)


def test_object_that_is_no_configuration():
    with pytest.raises(
        TypeError, match="config: given an object of type dict, wanted one of: FlashForwardKernelConfig"
    ):
        binding.find(FIELDS, PLAIN, 80)


# ---------------------------------------------------------------- libraries
@pytest.fixture(scope="module")
def kernels():
    return [ForwardKernel(CONFIG), ForwardKernel(CONFIG, ForwardTraits(causal=True))]


@pytest.fixture(scope="module")
def library(kernels, tmp_path_factory):
    """A kernel library by the real compiler, around a kernel that does nothing."""
    from small_root import make_small_root

    folder = tmp_path_factory.mktemp("library")
    root = make_small_root(folder / "include")
    (result,) = build_kernels(kernels, [80], cache=KernelCache(folder / "cache"), include_root=root)
    return result.path


def test_library_loads_without_a_gpu_and_is_listed(library, kernels):
    binding.load_library(str(library))
    assert binding.load_library(str(library)) == 0  # a second time changes nothing
    entries = [entry for entry in binding.registered() if entry[3] == 80]
    for kernel in kernels:
        entry = ("FlashForwardKernelConfig", FIELDS, dataclasses.asdict(kernel.traits), 80)
        assert entry in entries
        found = binding.find(kernel.config, kernel.traits, 80)
        assert (found.family, found.target, found.d_head, found.n_threads) == ("ampere", 80, 64, 256)
        assert found.smem_bytes == kernel.config.smem_bytes()
        assert binding.find(kernel.config, kernel.traits, 86) is None


def test_library_exports_its_entry_point_only(library):
    shown = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    )
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == ["flash_attention_kernel_library"]


def test_launch_without_a_gpu_says_so(library, kernels):
    binding.load_library(str(library))
    kernel = binding.find(kernels[0].config, kernels[0].traits, 80)
    for call in (kernel.load, kernel.attributes, lambda: kernel.launch(*launch_arguments())):
        with pytest.raises(
            RuntimeError, match=r"(load|attributes|launch): .*CUDA.* \(cudaError \d+\)"
        ) as caught:
            call()
        assert isinstance(caught.value, binding.CudaError)
        assert caught.value.args[1] in (35, 100)  # no driver, no device


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", "file too short"),
        (b"garbage" * 100, "invalid ELF header"),
        (None, "cannot open shared object file"),
    ],
)
def test_file_that_is_no_library(tmp_path, contents, reason):
    path = tmp_path / "broken.so"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(RuntimeError, match=f"cannot load the kernel library: .*broken.so.*{reason}"):
        binding.load_library(str(path))


ENTRY_POINT = """
#include "flash_attention.cuh"
extern "C" const flash::KernelLibrary *flash_attention_kernel_library() {
    static constexpr flash::KernelLibrary library{ABI, FAMILY, "forward", 0, nullptr, nullptr};
    return &library;
}
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("int something_else;", "no kernel library: it does not export flash_attention_kernel_library"),
        (
            ENTRY_POINT.replace("ABI", "99").replace("FAMILY", '"ampere"'),
            "built for interface version 99, this binding",
        ),
        (
            ENTRY_POINT.replace("ABI", "flash::kAbiVersion").replace("FAMILY", '"mars"'),
            "kernels of family 'mars', direction 'forward', are unknown",
        ),
    ],
)
def test_library_of_another_kind(tmp_path, text, reason):
    library = compile_library(tmp_path, text)
    with pytest.raises(RuntimeError, match=f"{library}: {reason}"):
        binding.load_library(str(library))


# ---------------------------------------------------------------- what a launch passes on
def test_launch_passes_every_argument(echo):
    seen = Problem()
    big = 1 << 40
    echo.launch(
        big + 1, big + 2, big + 3, ctypes.addressof(seen), big + 5, big + 6,
        (2, 3, 8, 64), (2, 5, 4, 64),
        (big + 10, 11, 12, 1), (20, big + 21, 22, 1), (30, 31, big + 32, 1), (-40, 41, 42, 1), 0.125,
    )  # fmt: skip
    assert (seen.q, seen.k, seen.v, seen.lse, seen.stream) == (big + 1, big + 2, big + 3, big + 5, big + 6)
    strides = [
        (s.batch, s.seq, s.head) for s in (seen.q_strides, seen.k_strides, seen.v_strides, seen.o_strides)
    ]
    assert strides == [(big + 10, 11, 12), (20, big + 21, 22), (30, 31, big + 32), (-40, 41, 42)]
    assert (seen.batch, seen.n_heads, seen.n_heads_kv, seen.seq_len_q, seen.seq_len_k) == (2, 8, 4, 3, 5)
    assert seen.softmax_scale == 0.125
    assert (seen.d_head, seen.d_head_v, seen.sinks, seen.cu_seqlens_q) == (64, 64, None, None)
    assert seen.window_left == seen.window_right == cuda.UNBOUNDED


def test_launch_passes_every_feature(echo):
    seen = Problem()
    arguments = launch_arguments(o=ctypes.addressof(seen))
    features = cuda.Features(
        64, 7, 0, 30.0, 1 << 41, 1 << 42, 1 << 43, 1 << 44, 1 << 45, 1 << 49, 3, 1 << 46, 1 << 47
    )
    features = features._replace(block_table=1 << 48, max_pages=10, page_size=48, o_float32=True, n_sms=5)
    features = features._replace(seqused_q=1 << 50, plan_slots=132, plan_shortest=2, plan_longest=16)
    features = features._replace(plan_few_queries=8, plan_fixed=3, partial_rows=1 << 40, kept_sums=1 << 51)
    echo.launch(*arguments, features)
    assert [getattr(seen, name) for name in features._fields] == list(features)
    assert (seen.n_pages, seen.seq_len_k) == (arguments[7][0], 480)


@pytest.mark.parametrize("pages", [(0, 16), (16, 0), (-1, 16), (1 << 20, 1 << 12), (2**31 - 1, 4)])
def test_launch_refuses_impossible_pages(echo, pages):
    features = cuda.Features(64, block_table=1 << 48, max_pages=pages[0], page_size=pages[1])
    with pytest.raises(ValueError, match="1 to 2\\^31 - 1 keys"):
        echo.launch(*launch_arguments(o=ctypes.addressof(Problem())), features)


@pytest.mark.parametrize("features", [None, (), (64, 1), [64] * 12, [64] * 17])
def test_launch_refuses_other_features(echo, features):
    with pytest.raises(TypeError, match=r"features must be the tuple \(d_head_v, window_left"):
        echo.launch(*launch_arguments(o=ctypes.addressof(Problem())), features)


def test_features_are_read_in_the_order_of_the_binding():
    assert binding.feature_names == f"({', '.join(cuda.Features._fields)})"


def test_launch_takes_what_torch_hands_out(echo):
    import torch

    q = torch.zeros(2, 3, 4, 64, dtype=torch.float16).transpose(1, 2)
    o = torch.zeros(4096, dtype=torch.uint8)
    echo.launch(
        q.data_ptr(),
        q.data_ptr(),
        q.data_ptr(),
        o.data_ptr(),
        0,
        0,
        q.shape,
        q.shape,
        q.stride(),
        q.stride(),
        q.stride(),
        q.stride(),
        1,
    )
    seen = Problem.from_buffer_copy(o.numpy().tobytes())
    assert (seen.q, seen.seq_len_q, seen.n_heads, seen.q_strides.seq) == (q.data_ptr(), 4, 3, 64)


def test_error_of_a_launch_is_raised(echo):
    with pytest.raises(binding.CudaError, match=r"^\('launch: told to fail \(cudaError 1\)', 1\)$"):
        echo.launch(*launch_arguments(softmax_scale=0))


def test_attributes(echo):
    assert echo.attributes() == {
        "registers": 128,
        "local_bytes": 16,
        "static_smem_bytes": 32,
        "max_threads_per_block": 256,
        "blocks_per_sm": 2,
    }


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"q_shape": (2, 3, 4, 128)}, ValueError, "head sizes 128 and 64; the kernel is compiled for 64"),
        ({"q_shape": (1 << 31, 3, 4, 64)}, ValueError, "size 2147483648 of axis 0; allowed: 0 to 2"),
        ({"k_shape": (2, -3, 4, 64)}, ValueError, "size -3 of axis 1; allowed: 0 to 2"),
        ({"q_stride": (1, 2, 3)}, TypeError, "argument 9 is no tuple of 4 integers; wanted launch"),
        ({"q_shape": [2, 3, 4, 64]}, TypeError, "argument 7 is no tuple of 4 integers; wanted launch"),
        ({"q": "pointer"}, TypeError, "integer"),
        ({"softmax_scale": "1"}, TypeError, "must be real number, not str"),
        ({"o_stride": (1, 2, "3", 1)}, TypeError, "integer"),
        ({"o_stride": (1 << 64, 2, 3, 1)}, OverflowError, "too"),
    ],
)
def test_launch_refuses_nonsense(echo, changes, error, reason):
    with pytest.raises(error, match=reason):
        echo.launch(*launch_arguments(**changes))


def test_launch_refuses_another_number_of_arguments(echo):
    with pytest.raises(TypeError, match="given 2 arguments; wanted launch"):
        echo.launch(1, 2)
