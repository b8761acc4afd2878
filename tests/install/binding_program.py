"""Uses the binding as far as that takes neither torch nor a GPU, in any Python that the wheel is for.

Called as ``binding_program.py <folder of the unpacked wheel> <echo library>``.
"""

import ctypes
import gc
import glob
import sys
import weakref
from contextlib import nullcontext

folder, echo_library = sys.argv[1:]
sys.path.insert(0, folder)

import flash_attention_kernels as binding  # noqa: E402

from flash_helpers.kernel_configs import PLAIN, DType, FlashForwardKernelConfig  # noqa: E402

assert binding.__file__.startswith(folder), binding.__file__

# ---------------------------------------------------------------- kernels
(library,) = glob.glob(f"{folder}/flash_helpers/prebuilt/libraries/*/*.so")
assert binding.load_library(path=library) == 1
assert binding.load_library(library) == 0
((struct, values, traits, target),) = binding.registered()
assert (struct, target, values["d_head"], any(traits.values())) == ("FlashForwardKernelConfig", 80, 64, False)
assert list(values) == binding.config_field_names(struct)
config = FlashForwardKernelConfig(DType.FP16, 64, 64, 64, 4, True, True, True, 0, 0, 0, False, True)
kernel = binding.find(config, PLAIN, target=80)
assert (kernel.family, kernel.target, kernel.d_head, kernel.n_threads) == ("ampere", 80, 64, 128)


def error_of(call, kind):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind}")


if not glob.glob("/dev/nvidia0"):
    assert error_of(kernel.load, binding.CudaError).args[1] in (35, 100)  # no driver, no device
assert "object of type NoneType" in str(error_of(lambda: binding.find(None, PLAIN, 80), TypeError))


# ---------------------------------------------------------------- launches and tables of calls
class Tensor:
    """As much of a torch.Tensor as a table of calls asks for."""

    shape, dtype, is_cuda, requires_grad, _version = (
        property(lambda self, value=value: value) for value in ((1, 8, 2, 64), DType.FP16, False, False, 0)
    )

    def __init__(self):
        self.memory = ctypes.create_string_buffer(4096)

    def data_ptr(self):
        return ctypes.addressof(self.memory)

    def get_device(self):
        return -1

    def is_neg(self):
        return False

    def stride(self):
        return (1024, 128, 64, 1)


DType.itemsize = 2
binding.load_library(echo_library)
echo = binding.find(
    FlashForwardKernelConfig(DType.FP16, 64, 1, 1, 1, *(False,) * 3, 0, 0, 0, *(False,) * 2), PLAIN, 1
)
functions = lambda: False, lambda index: index, lambda index: 7, lambda: False, lambda: 0, nullcontext
binding.read_tensors(Tensor, Tensor, None, *functions)


class Label:
    pass


def check():
    q, k, v, o = (Tensor() for _ in range(4))
    arguments = (*(x.data_ptr() for x in (q, k, v, o)), 0, 0, *(q.shape,) * 2, *(q.stride(),) * 4, 0.5)
    echo.launch(*arguments)
    assert ctypes.c_void_p.from_buffer(o.memory).value == q.data_ptr()
    table, label = binding.CallTable(), Label()
    label.table = table
    assert table.remember((q, k, v), (o, None, None), (Tensor, None, None), echo.launch, arguments, 0, label)
    other = Tensor()
    for made in (table.call(other, k, v), table(other, k, v)):
        assert ctypes.c_void_p.from_buffer(made.memory).value == other.data_ptr()
    assert table.last is label
    assert table.call(k, v) is None
    for _ in range(1000):
        assert table.call(q, k, v) is not None
    return weakref.ref(label)


alive = check()
gc.collect()
assert alive() is None
print("used", sys.version.split()[0])
