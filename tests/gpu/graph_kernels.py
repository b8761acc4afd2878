"""The kernels that a call launches and their thread blocks, as a CUDA graph of the call names them.

A profiler would see them too, but its first session in a process may miss kernels or time them wrongly.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch

KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of cuda.h."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),  # counts where func is null
        ("ctx", ctypes.c_void_p),
    )


def launched(call: Callable[[], object]) -> list[tuple[str, int]]:
    """(mangled name, thread blocks) of every kernel that the call launches; it has been made before."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    driver = ctypes.CDLL("libcuda.so.1")

    def ask(function: str, *arguments: object) -> None:
        error = getattr(driver, function)(*arguments)
        assert error == 0, f"{function} answers with error {error}"

    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    ask("cuGraphGetNodes", handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    ask("cuGraphGetNodes", handle, nodes, ctypes.byref(count))
    kernels = []
    for node in nodes:
        kind, facts, name = ctypes.c_int(-1), KernelNode(), ctypes.c_char_p()
        ask("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value != KERNEL_NODE:
            continue
        ask("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(facts))
        if facts.func:
            ask("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(facts.func))
        else:
            ask("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(facts.kern))
        kernels.append(((name.value or b"").decode(), math.prod(facts.grid)))
    return kernels
