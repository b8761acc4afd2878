"""Tables of calls: what they hold and let go, and tensors that have lost their memory."""

import ctypes
import gc
import sys
import weakref

import flash_attention_kernels as binding
import pytest
import torch
from told_calls import SHAPE, arguments, inputs, maker, remembered

pytestmark = pytest.mark.compile

MAX_LAUNCHES = 256
SHAPES = [(1, 4, 1 + n, 64) for n in range(MAX_LAUNCHES)]  # enough memory for what the kernel writes


def tell(table, echo, shape, label="kernel"):
    """Tells a table of a call of this shape."""
    (q, k, v), o = inputs(shape), torch.empty(shape, dtype=torch.float16)
    launch = arguments(q, k, v, o)
    return table.remember(
        (q, k, v), (o, None, None), (maker(shape), None, None), echo.launch, launch, 0, label
    )


class Label:
    """Does something when it is let go."""

    def __init__(self, last_words):
        self.last_words = last_words

    def __del__(self):
        self.last_words()


# ---------------------------------------------------------------- held and let go
def test_a_label_may_use_the_table_that_lets_it_go(devices, echo):
    table, shape, answers = binding.CallTable(), (1, 7, 3, 64), []

    def use():
        answers.append((len(table), tell(table, echo, shape), table.call(*inputs(shape)) is not None))

    for each in SHAPES:
        assert tell(table, echo, each, Label(use))
    assert not answers
    assert tell(table, echo, (1, 5, 1, 64))
    # The table was whole when the first label went: the new call alone stood in it.
    assert answers[0] == (1, True, True)
    assert len(answers) == MAX_LAUNCHES
    assert len(table) == 2
    assert table.call(*inputs(shape)) is not None


def test_a_table_that_holds_itself_is_collected(devices, echo):
    table = binding.CallTable()
    assert gc.is_tracked(table)
    label = Label(lambda: None)
    label.table = table
    assert tell(table, echo, SHAPE, label)
    table.call(*inputs())
    assert table.last is label
    alive = weakref.ref(label)
    del table, label
    gc.collect()
    assert alive() is None


class Maker:
    def __init__(self, table):
        self.table = table

    def __call__(self):
        return torch.empty(SHAPE, dtype=torch.float16)


def test_a_maker_that_holds_its_table_is_collected(devices, echo):
    table = binding.CallTable()
    (q, k, v), o, own = inputs(), torch.empty(SHAPE, dtype=torch.float16), Maker(table)
    launch = arguments(q, k, v, o)
    assert table.remember((q, k, v), (o, None, None), (own, None, None), echo.launch, launch, 0, "")
    assert table.call(q, k, v) is not None
    alive = weakref.ref(own)
    del table, own
    gc.collect()
    assert alive() is None


def test_collecting_changes_no_table_in_use(devices, echo):
    table = remembered(echo, inputs(), torch.empty(SHAPE, dtype=torch.float16))
    for _ in range(3):
        gc.collect()
        assert table.call(*inputs()) is not None


def failing_maker():
    def fail():
        return 1 // 0

    return fail


def test_calls_keep_and_lose_no_reference(devices, echo):
    given = [*inputs(), torch.empty(SHAPE, dtype=torch.float16)]
    label = Label(lambda: None)
    made = remembered(echo, given[:3], given[3], label)
    writes = remembered(echo, given, given[3], label)
    makes_nothing = failing_maker()
    fails = binding.CallTable()
    launch = arguments(*given)
    assert fails.remember(
        tuple(given[:3]), (given[3], None, None), (makes_nothing, None, None), echo.launch, launch, 0, label
    )
    held = [*given, label, made, writes, fails, makes_nothing, None, True, False, torch.Tensor]

    def repeat(times):
        for _ in range(times):
            made.call(*given[:3])
            made(*given[:3])
            assert writes.call(*given) is given[3]
            made.call(given[0], None, 1)
            with pytest.raises(ZeroDivisionError):
                fails.call(*given[:3])

    repeat(3)
    before = [sys.getrefcount(x) for x in held]
    repeat(300)
    drift = [sys.getrefcount(x) - old for x, old in zip(held, before, strict=True)]
    assert all(abs(change) < 100 for change in drift), drift


# ---------------------------------------------------------------- tensors without memory
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("offset", [0, 64])
def test_a_tensor_that_lost_its_memory_goes_the_long_way(devices, echo, place, offset):
    table = remembered(echo, inputs(), torch.empty(SHAPE, dtype=torch.float16))
    given = inputs()
    numbers = torch.zeros(given[place].numel() + offset, dtype=torch.float16)
    given[place] = numbers[offset:].view(SHAPE)
    assert table.call(*given) is not None
    numbers.untyped_storage().resize_(0)
    assert given[place].data_ptr() == 2 * offset  # the pointer alone does not tell
    assert table.call(*given) is None
    numbers.untyped_storage().resize_(2 * numbers.numel())
    assert table.call(*given) is not None


@pytest.mark.parametrize("place", range(3))
def test_a_wrapper_without_memory_goes_the_long_way(devices, echo, place):
    table = remembered(echo, inputs(), torch.empty(SHAPE, dtype=torch.float16))
    given = inputs()
    given[place] = torch._to_functional_tensor(given[place])  # as torch.func.functionalize passes tensors
    assert type(given[place]) is torch.Tensor
    assert table.call(*given) is None


def test_an_output_that_lost_its_memory_goes_the_long_way(devices, echo):
    given = [*inputs(), torch.empty(SHAPE, dtype=torch.float16)]
    table = remembered(echo, given, given[3])
    given[3].untyped_storage().resize_(0)
    assert table.call(*given) is None


# ---------------------------------------------------------------- what remember refuses
def test_what_is_made_needs_a_maker(devices, echo):
    table, (q, k, v), o = binding.CallTable(), inputs(), torch.empty(SHAPE, dtype=torch.float16)
    launch = arguments(q, k, v, o)
    with pytest.raises(TypeError, match=r"makers\[0\] is None; made\[0\] is given, so it must be a function"):
        table.remember((q, k, v), (o, None, None), (None,) * 3, echo.launch, launch, 0, "")
    assert len(table) == 0


def test_a_call_needs_an_output(devices, echo):
    table, (q, k, v) = binding.CallTable(), inputs()
    launch = list(arguments(q, k, v, q))
    launch[3], launch[6] = 0, (0, *launch[6][1:])  # no query, so that no output is needed to launch
    with pytest.raises(TypeError, match="no out"):
        table.remember((q, k, v), (None,) * 3, (None,) * 3, echo.launch, tuple(launch), 0, "")


def test_a_table_is_made_empty():
    for wrong in ((1,), (None, None)):
        with pytest.raises(TypeError, match="made empty, without arguments"):
            binding.CallTable(*wrong)
    with pytest.raises(TypeError, match="made empty, without arguments"):
        binding.CallTable(size=1)


@pytest.mark.parametrize("wrong", [(1, 2, 3, 4, 5, 64), "text"])
def test_a_maker_that_makes_something_else(devices, echo, wrong):
    table, (q, k, v), o = binding.CallTable(), inputs(), torch.empty(SHAPE, dtype=torch.float16)
    launch = arguments(q, k, v, o)

    def make():
        return wrong if isinstance(wrong, str) else torch.empty(wrong)

    assert table.remember((q, k, v), (o, None, None), (make, None, None), echo.launch, launch, 2, "")
    with pytest.raises((TypeError, RuntimeError, AttributeError)):
        table.call(q, k, v)
    assert devices.current == 0


# ---------------------------------------------------------------- the reader of tensors
NAME = b"dlpack_exchange_api"  # a capsule does not copy it


class ExchangeApi(ctypes.Structure):
    """DLPack's table of functions."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("older", "allocator", "from_object", "to_object")),
        *((name, ctypes.c_void_p) for name in ("tensor_from_object", "current_work_stream")),
    ]


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="torch older than 2.10")
def test_a_stream_that_cannot_be_asked_for(devices, echo):
    capsule = torch.Tensor.__dlpack_c_exchange_api__
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    api = ExchangeApi.from_buffer_copy(ctypes.string_at(get(capsule, NAME), ctypes.sizeof(ExchangeApi)))
    refuse = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)(lambda *_: -1)
    api.current_work_stream = ctypes.cast(refuse, ctypes.c_void_p)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    broken = new(ctypes.addressof(api), NAME, None)
    devices.read_tensors(broken)
    table = remembered(echo, inputs(), torch.empty(SHAPE, dtype=torch.float16), device=1)
    with pytest.raises(RuntimeError, match="current stream of CUDA device 1 cannot be asked for"):
        table.call(*inputs())
    assert devices.current == 0


def test_a_reader_takes_types_and_functions_alone(devices):
    functions, types = devices.functions(), (torch.Tensor, torch.nn.Parameter)
    for wrong in (("Tensor", torch.nn.Parameter), (torch.Tensor, "Parameter")):
        with pytest.raises(TypeError, match="must be type, not str"):
            binding.read_tensors(*wrong, None, *functions)
    for place in range(len(functions)):
        given = [*functions]
        given[place] = None
        with pytest.raises(TypeError, match="given None, wanted a function"):
            binding.read_tensors(*types, None, *given)
    with pytest.raises(AttributeError, match="data_ptr"):
        binding.read_tensors(int, bool, None, *functions)
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        binding.read_tensors(*types, 1, *functions)
