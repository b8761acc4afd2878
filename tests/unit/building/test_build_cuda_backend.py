"""The CUDA backend without a GPU: torch's questions about devices are answered by stand-ins."""

import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
import types
import weakref
from pathlib import Path

import pytest
import torch

from flash_attention import errors
from flash_attention.backends import cuda, cuda_kernels
from flash_helpers.build import build_kernels, sources
from flash_helpers.build import compile as compile_module
from flash_helpers.kernel_configs import KNOWN_DEVICES, DType, FlashForwardKernelConfig, ForwardKernel

pytestmark = pytest.mark.compile

ROOT = Path(__file__).resolve().parents[3]
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_multiprocessor=228 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    L2_cache_size=50 * 1024 * 1024,
    max_threads_per_multi_processor=2048,
)


_sizes = itertools.count(16, 16)


def new_kernel():
    """A kernel that no other test has: the registry lives as long as the process."""
    sizes = (64, 64, next(_sizes), 4)
    return ForwardKernel(FlashForwardKernelConfig(DType.FP16, *sizes, True, True, True, 0, 2, 2, True, True))


@pytest.fixture
def device(monkeypatch, tmp_path, small_root):
    """A machine whose one GPU is what the test sets; kernels are small, the cache is the test's own."""
    properties = types.SimpleNamespace(**vars(H100))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(sources, "include_root", lambda: small_root)
    monkeypatch.setattr(cuda_kernels, "_loaded", {})
    monkeypatch.setattr(cuda, "_launches", {})
    monkeypatch.setenv("FLASH_ATTENTION_CACHE_DIR", str(tmp_path / "cache"))
    cuda_kernels._facts_of_index.cache_clear()
    yield properties
    cuda_kernels._facts_of_index.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch):
    def refuse():
        raise errors.CompilerNotFoundError("no usable nvcc")

    monkeypatch.setattr(compile_module, "find_nvcc", refuse)


# ---------------------------------------------------------------- devices
def test_facts_of_a_known_device(device):
    assert cuda.device_facts_of("cuda:0") == KNOWN_DEVICES["H100"]
    assert cuda.device_facts_of() == cuda.device_facts_of(0) == cuda.device_facts_of(torch.device("cuda"))


def test_facts_of_an_unknown_device(device):
    device.name, device.major, device.minor, device.multi_processor_count = "Some GPU", 8, 6, 30
    facts = cuda.device_facts_of(0)
    assert (facts.target, facts.sm_count, facts.blocks_per_sm, facts.mma_flops) == (86, 30, 16, 0.0)


def test_no_cuda_device():
    for call in (cuda.device_facts_of, lambda: cuda.get_kernel(new_kernel(), "cuda")):
        with pytest.raises(errors.NoCudaDeviceError, match="CPU tensors run on the CPU backend"):
            call()


def test_device_that_is_not_cuda(device):
    with pytest.raises(errors.NoCudaDeviceError, match="device cpu is not a CUDA device; pass cuda, cuda:0"):
        cuda.get_kernel(new_kernel(), "cpu")


def test_device_that_is_too_old(device):
    device.name, device.major, device.minor = "Tesla T4", 7, 5
    with pytest.raises(
        errors.DeviceNotSupportedError, match=r"cuda:0 \(Tesla T4\) is of generation sm_75.*sm_80 and newer"
    ):
        cuda.get_kernel(new_kernel(), 0)


# ---------------------------------------------------------------- finding and building
def test_first_use_compiles_and_says_so_in_one_line(device, capsys):
    kernel = new_kernel()
    # The library loads, then `load` meets the machine that has no GPU.
    with pytest.raises(
        errors.KernelLaunchError, match=r"cuda:0 \(NVIDIA H100.*9\.0\): load: .*CPU tensors"
    ) as caught:
        cuda.get_kernel(kernel, 0)
    assert caught.value.code in (35, 100)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"compiling {kernel.short_form()} for sm_90 on first use" in said
    assert (kernel, 90) in cuda.registered_kernels()
    with pytest.raises(errors.KernelLaunchError):
        cuda.get_kernel(kernel, 0)
    assert capsys.readouterr().err == ""


def test_kernels_built_ahead_of_time_are_found_on_disk(device, monkeypatch, capsys):
    first, second = new_kernel(), new_kernel()
    build_kernels([first, second], [90])
    monkeypatch.setattr(compile_module, "find_nvcc", lambda: pytest.fail("looked for a compiler"))
    monkeypatch.setenv("FLASH_ATTENTION_JIT", "0")
    found = cuda.load_kernel(second, 90)
    assert (found.family, found.target) == ("ampere", 90)
    assert cuda.load_kernel(first, 90).target == 90
    assert capsys.readouterr().err == ""


def test_code_of_an_earlier_minor_revision_serves(device, monkeypatch):
    kernel = new_kernel()
    build_kernels([kernel], [80])
    monkeypatch.setenv("FLASH_ATTENTION_JIT", "0")
    assert cuda.load_kernel(kernel, 89).target == 80
    assert cuda.load_kernel(kernel, 90) is None


def test_not_built_names_reason_closest_and_command(device, monkeypatch):
    kernel = new_kernel()
    near = dataclasses.replace(kernel, config=dataclasses.replace(kernel.config, optimized_softmax=False))
    far = dataclasses.replace(
        kernel,
        config=FlashForwardKernelConfig(
            DType.BF16, 128, 256, 128, 8, False, False, False, 2, 2, 2, False, False
        ),
    )
    build_kernels([near, far], [90])
    monkeypatch.setattr(cuda_kernels, "registered_kernels", lambda: [(far, 80)])
    monkeypatch.setenv("FLASH_ATTENTION_JIT", "0")
    with pytest.raises(errors.KernelNotBuiltError) as caught:
        cuda.get_kernel(kernel, 0)
    error = caught.value
    assert error.closest == (near.short_form(), far.short_form())
    assert error.command == f'python -m flash_attention build "{kernel.short_form()}" --target 90'
    for part in (kernel.short_form(), "sm_90", "FLASH_ATTENTION_JIT=0", near.short_form(), error.command):
        assert part in str(error)


def test_not_built_and_no_compiler(device, no_compiler):
    with pytest.raises(errors.KernelNotBuiltError, match="is not built for sm_90, and no usable nvcc"):
        cuda.get_kernel(new_kernel(), 0)


def test_compile_error_reaches_the_caller(device, small_root):
    (small_root / "ampere" / "inner.cuh").write_text('#error "broken header"\n')
    with pytest.raises(errors.KernelCompileError, match="broken header"):
        cuda.get_kernel(new_kernel(), 0)


def test_missing_extension_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attention_kernels", None)
    cuda_kernels.extension.cache_clear()
    try:
        with pytest.raises(
            errors.BindingNotBuiltError, match=r"flash_attention_kernels does not load.*install g\+\+"
        ):
            cuda.registered_kernels()
    finally:
        cuda_kernels.extension.cache_clear()


# ---------------------------------------------------------------- forward
class Recorder:
    """In place of a loaded kernel."""

    def __init__(self):
        self.calls, self.errors = [], []

    def launch(self, *arguments):
        self.calls.append(arguments)
        if self.errors:
            raise self.errors.pop()


@pytest.fixture
def recorder(device, monkeypatch):
    """CPU tensors count as tensors of device -1, which is the current one."""
    recorder, asked = Recorder(), []
    monkeypatch.setattr(cuda, "current_device", lambda: -1)
    monkeypatch.setattr(cuda, "current_stream", lambda index: 77)
    monkeypatch.setattr(cuda, "get_kernel", lambda kernel, device: asked.append(kernel) or recorder)
    monkeypatch.setattr(torch, "device", lambda kind, index: index)
    recorder.asked = asked
    return recorder


def tensors():
    q = torch.randn(2, 8, 4, 64).half().transpose(1, 2)
    k, v = torch.randn(2, 16, 2, 64).half(), torch.randn(2, 16, 2, 128).half()[..., :64]
    return q, k, v, torch.empty_like(q), torch.empty(2, 8, 4)


def test_forward_passes_tensors_and_stream(recorder):
    q, k, v, o, lse = tensors()
    kernel = new_kernel()
    launched = cuda.forward(kernel, q, k, v, o, lse, 0.5)
    assert launched == (recorder.launch, recorder.calls[0])
    cuda.forward(kernel, q, k, v, o, None, 0.25)
    pointers = tuple(t.data_ptr() for t in (q, k, v, o))
    rest = (77, q.shape, k.shape, q.stride(), k.stride(), v.stride(), o.stride())
    assert recorder.calls == [(*pointers, lse.data_ptr(), *rest, 0.5), (*pointers, 0, *rest, 0.25)]
    assert recorder.asked == [kernel]  # looked for once


def test_forward_keeps_no_tensor(recorder):
    arguments = tensors()
    alive = [weakref.ref(tensor) for tensor in arguments]
    cuda.forward(new_kernel(), *arguments, 1.0)
    recorder.calls.clear()
    del arguments
    assert [reference() for reference in alive] == [None] * 5


def test_forward_goes_to_the_tensors_device(recorder, monkeypatch):
    entered = []
    current = [3]
    monkeypatch.setattr(cuda, "current_device", lambda: current[0])

    @contextlib.contextmanager
    def guard(index):
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", guard)
    cuda.forward(new_kernel(), *tensors(), 1.0)
    assert entered == [-1]
    assert current == [3]
    assert len(recorder.calls) == 1


def test_failed_launch_raises_and_the_next_one_works(recorder, monkeypatch):
    kernel, arguments = new_kernel(), tensors()
    recorder.errors.append(cuda_kernels.extension().CudaError("launch: no kernel image (cudaError 209)", 209))
    monkeypatch.setattr(cuda_kernels, "device_facts_of", lambda device: KNOWN_DEVICES["A100"])
    with pytest.raises(
        errors.KernelLaunchError, match=r"A100.*8\.0\): launch: no kernel image.*build it for this"
    ) as caught:
        cuda.forward(kernel, *arguments, 1.0)
    assert caught.value.code == 209
    cuda.forward(kernel, *arguments, 1.0)
    assert len(recorder.calls) == 2


# ---------------------------------------------------------------- import
def test_import_starts_no_cuda_and_no_process_and_writes_no_file(tmp_path):
    """Audit events tell of processes, written files and loaded libraries while the backend is imported."""
    code = """
import sys, torch
seen = []
def audit(event, args):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.mkdir"):
        seen.append((event, args))
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append((event, args))
sys.addaudithook(audit)
import flash_attention.backends.cuda as cuda
assert "flash_attention_kernels" not in sys.modules
assert not torch.cuda.is_initialized()
assert not seen, seen
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'py'}", "HOME": str(tmp_path), "PATH": ""}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("CUDA_HOME", None)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []


def test_builder_imports_no_torch():
    code = "import sys, flash_helpers.build, flash_helpers.build.nvcc; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "py")}, check=True
    )
