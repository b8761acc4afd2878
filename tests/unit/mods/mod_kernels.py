"""Forward kernels of the Ampere family with a mod: their unit, and a launch by way of ctypes."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch
from generated import arguments, captured_initializer

from flash_attention.mods.tracing import Traced
from flash_helpers.build.nvcc import find_nvcc
from flash_helpers.build.sources import include_root
from flash_helpers.kernels.kernel import ForwardKernel
from flash_helpers.mods.cpp import HEADER, cpp_source, mod_id

UNIT = """#include "ampere/forward/launcher.cuh"
#include "{header}"

{mod}
using Launcher = flash::ampere::ForwardLauncher<{config}, {traits}, {name}>;

extern "C" int launch(void *const *tensors, const int64_t *n, float scale, const int64_t *whole,
                      const double *real, void *const *data, const int64_t *strides, const int *sizes,
                      void *stream) {{
    const {name}::Captured captured{{{captured}}};
    const flash::ForwardProblem problem{{
        .q = tensors[0], .k = tensors[1], .v = tensors[2], .o = tensors[3],
        .lse = static_cast<float *>(tensors[4]),
        .q_strides = {{n[0], n[1], n[2]}}, .k_strides = {{n[3], n[4], n[5]}},
        .v_strides = {{n[6], n[7], n[8]}}, .o_strides = {{n[9], n[10], n[11]}},
        .batch = int(n[12]), .n_heads = int(n[13]), .n_heads_kv = int(n[14]),
        .seq_len_q = int(n[15]), .seq_len_k = int(n[16]), .d_head = int(n[17]), .d_head_v = int(n[17]),
        .softmax_scale = scale, .n_splits = 1,
    }};
    if (const int error = Launcher::load()) return error;
    return Launcher::launch_mod<{target}>(problem, captured, stream);
}}
"""


def unit(kernel: ForwardKernel, traced: Traced, target: int) -> str:
    """The text of a kernel with a mod."""
    return UNIT.format(
        header=HEADER,
        mod=cpp_source(traced.mod),
        name=mod_id(traced.mod),
        target=target,
        captured=captured_initializer(traced.mod),
        config=kernel.config.to_cpp_struct(),
        traits=kernel.traits.to_cpp_struct(),
    )


def compiled(folder: Path, text: str, target: int, *flags: str) -> str:
    """Compiles a unit; gives what the compiler says of its resources."""
    (folder / "unit.cu").write_text(text, encoding="utf-8")
    command = [
        str(find_nvcc().path), "-std=c++20", "-O3", "-Xptxas", "-v", f"-arch=sm_{target}",
        f"-I{include_root()}", *flags, "unit.cu",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return done.stderr


class ModKernel:
    """A compiled kernel with a mod."""

    def __init__(self, folder: Path, kernel: ForwardKernel, traced: Traced, target: int) -> None:
        self.traced = traced
        flags = ("-Xcompiler", "-fPIC", "-shared", "-cudart", "static", "-o", "unit.so")
        compiled(folder, unit(kernel, traced, target), target, *flags)
        self.library = ctypes.CDLL(str(folder / "unit.so"))

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, ...]:
        """Output and LSE of CUDA tensors, of the kernel's type and head size."""
        batch, seq_q, heads, d = q.shape
        out, lse = torch.empty_like(q), q.new_empty(batch, heads, seq_q, dtype=torch.float32)
        tensors = (ctypes.c_void_p * 5)(*(x.data_ptr() for x in (q, k, v, out, lse)))
        strides = [s for x in (q, k, v, out) for s in x.stride()[:3]]
        numbers = [*strides, batch, heads, k.shape[2], seq_q, k.shape[1], d]
        launch = self.library.launch
        launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, *[ctypes.c_void_p] * 6]
        stream = torch.cuda.current_stream().cuda_stream
        given = arguments(self.traced)
        error = launch(
            tensors,
            (ctypes.c_int64 * len(numbers))(*numbers),
            scale,
            *(ctypes.addressof(x) for x in given),
            stream,
        )
        torch.cuda.synchronize()
        assert error == 0, error
        return out, lse
