"""A kernel without CUDA: its launch runs on the host and writes what it was given to the output."""

import ctypes
import subprocess

import flash_attention_kernels as binding

from flash_helpers.build.sources import include_root
from flash_helpers.kernel_configs import PLAIN, DType, FlashForwardKernelConfig


def compile_library(folder, text):
    source, library = folder / "library.cpp", folder / "library.so"
    source.write_text(text)
    subprocess.run(
        ["g++", "-std=c++20", "-shared", "-fPIC", "-I", include_root(), source, "-o", library], check=True
    )
    return library


class Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "seq", "head")]


class Problem(ctypes.Structure):
    """flash::ForwardProblem, and the stream that came with it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse")),
        *((name, Strides) for name in ("q_strides", "k_strides", "v_strides", "o_strides")),
        *((name, ctypes.c_int) for name in ("batch", "n_heads", "n_heads_kv", "seq_len_q", "seq_len_k")),
        *((name, ctypes.c_int) for name in ("d_head", "d_head_v")),
        ("softmax_scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("window_left", "window_right")),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k")),
        *((name, ctypes.c_int64) for name in ("total_q", "total_k")),
        ("n_splits", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("partial_o", "partial_lse")),
        ("o_float32", ctypes.c_bool),
        ("kept_sums", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("n_pages", "max_pages", "page_size")),
        ("seqused_q", ctypes.c_void_p),
        *(
            (f"plan_{name}", ctypes.c_int)
            for name in ("slots", "shortest", "longest", "few_queries", "fixed")
        ),
        ("partial_rows", ctypes.c_int64),
        ("n_sms", ctypes.c_int),
        ("mod", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]


ECHO = """
#include <cstring>
#include "flash_attention.cuh"
namespace {
constexpr FlashForwardKernelConfig config{DType::FP16, 64, 1, 1, 1};
constexpr flash::ForwardKernelRecord<FlashForwardKernelConfig> record{
    config, ForwardTraits{}, 1, 32, 0,
    [] { return 0; },
    [](const flash::ForwardProblem &problem, void *stream) {
        if (problem.softmax_scale == 0) return 1;  // so that a launch can fail
        std::memcpy(problem.o, &problem, sizeof problem);
        std::memcpy(static_cast<char *>(problem.o) + sizeof problem, &stream, sizeof stream);
        return 0;
    },
    [](flash::KernelAttributes &out) { out = {128, 16, 32, 256, 2}; return 0; },
};
constexpr const void *records[] = {&record};
}
extern "C" const flash::KernelLibrary *flash_attention_kernel_library() {
    static constexpr flash::KernelLibrary library{flash::kAbiVersion, "ampere", "forward", 1, records,
                                                  [](int) { return "told to fail"; }};
    return &library;
}
"""


def find_echo(folder):
    """The kernel, of head size 64, as ``flash_attention_kernels.Kernel``."""
    binding.load_library(str(compile_library(folder, ECHO)))
    config = FlashForwardKernelConfig(DType.FP16, 64, 1, 1, 1, False, False, False, 0, 0, 0, False, False)
    return binding.find(config, PLAIN, 1)
