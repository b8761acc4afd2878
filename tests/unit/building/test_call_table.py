"""Calls made before: what a table knows again, what it does not, what it passes on. Tensors are the CPU's."""

import threading

import flash_attention_kernels as binding
import pytest
import torch
from told_calls import SCALE, SHAPE, arguments, inputs, maker, remembered, seen

pytestmark = pytest.mark.compile


# ---------------------------------------------------------------- what is passed on
def test_a_call_is_made_again_on_new_tensors(devices, echo):
    table = remembered(echo, inputs(), torch.empty(SHAPE, dtype=torch.float16))
    assert (len(table), table.last) == (1, None)
    q, k, v = inputs()
    o = table(q, k, v)
    problem = seen(o)
    assert (o.shape, o.dtype, table.last) == (torch.Size(SHAPE), torch.float16, "kernel")
    assert [problem.q, problem.k, problem.v, problem.o] == [x.data_ptr() for x in (q, k, v, o)]
    assert (problem.lse, problem.sinks, problem.cu_seqlens_q, problem.partial_o) == (None,) * 4
    assert (problem.batch, problem.seq_len_q, problem.n_heads, problem.d_head) == SHAPE
    assert (problem.q_strides.batch, problem.q_strides.seq, problem.q_strides.head) == q.stride()[:3]
    assert problem.softmax_scale == SCALE
    assert table(q, k, v, None, None) is not None  # what is left out is None
    assert table(*inputs()) is not o


def test_views_stay_as_far_from_their_tensors(devices, echo):
    q, k, v = inputs()
    table = remembered(
        echo, [q, k, v], torch.empty(SHAPE, dtype=torch.float16), views=(q, k[:, -3:], v[:, -3:])
    )
    q, k, v = inputs()
    problem = seen(table(q, k, v))
    assert (problem.q, problem.k, problem.v) == (q.data_ptr(), k[:, -3:].data_ptr(), v[:, -3:].data_ptr())
    assert problem.seq_len_k == 3


def test_every_pointer_comes_from_its_tensor(devices, echo):
    def call():
        sinks, ends, used = (
            torch.zeros(4),
            torch.zeros(3, dtype=torch.int32),
            torch.zeros(2, dtype=torch.int32),
        )
        table = torch.zeros(2, 5, dtype=torch.int32)
        return [*inputs(), None, sinks, ends, ends.clone(), used, table, used.clone(), 7, 9]

    first, lse, workspace = call(), torch.empty(2, 4, 8), torch.empty(1000)
    pointers = {"sinks": first[4].data_ptr(), "cu_seqlens_q": first[5].data_ptr()}
    pointers |= {"cu_seqlens_k": first[6].data_ptr(), "seqused_k": first[7].data_ptr()}
    pointers |= {"block_table": first[8].data_ptr(), "max_pages": 5, "page_size": SHAPE[1]}
    pointers |= {"seqused_q": first[9].data_ptr()}
    pointers |= {"partial_o": workspace.data_ptr(), "partial_lse": workspace[900:].data_ptr()}
    table = remembered(
        echo,
        first,
        torch.empty(SHAPE, dtype=torch.float16),
        lse=lse,
        workspace=workspace,
        n_splits=2,
        **pointers,
    )
    again = call()
    o, new_lse = table(*again)
    problem = seen(o)
    assert (new_lse.shape, new_lse.dtype, problem.lse) == (lse.shape, torch.float32, new_lse.data_ptr())
    names = ("sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "seqused_q")
    assert [getattr(problem, name) for name in names] == [x.data_ptr() for x in again[4:10]]
    assert problem.partial_lse - problem.partial_o == 3600
    for other in ([*again[:10], 7, 8], [*again[:10], 7, True], [*again[:10], 7, 1 << 70], again[:10]):
        assert table(*other) is None


def test_offsets_that_nobody_gives_are_kept(devices, echo):
    """They were found from a captured tensor, which the kernel does not read."""
    document, ends = torch.arange(8) // 3, torch.tensor([0, 3, 6, 8], dtype=torch.int32)
    given = [*inputs(), *(None,) * 7, (0,), document]
    offsets = {"cu_seqlens_q": ends.data_ptr(), "cu_seqlens_k": ends.data_ptr(), "total_q": 8, "total_k": 8}
    o = torch.empty(SHAPE, dtype=torch.float16)
    told = given, o
    with pytest.raises(AssertionError):  # nobody keeps them
        remembered(echo, *told, **offsets)
    with pytest.raises(AssertionError):  # a key count is no such thing
        remembered(echo, *told, kept=ends, seqused_k=ends.data_ptr())
    table = remembered(echo, *told, kept=ends, **offsets)
    again = [*inputs(), *given[3:]]
    problem = seen(table(*again))
    assert (problem.cu_seqlens_q, problem.cu_seqlens_k) == (ends.data_ptr(),) * 2
    assert (problem.q, problem.total_q) == (again[0].data_ptr(), 8)
    document[1] = 7
    assert table(*again) is None


def test_given_output_is_written_and_returned(devices, echo):
    given = [*inputs(), torch.empty(SHAPE, dtype=torch.float16)]
    table = remembered(echo, given, given[3])
    q, k, v, o = *inputs(), torch.empty(SHAPE, dtype=torch.float16)
    assert table(q, k, v, o) is o
    assert seen(o).o == o.data_ptr()
    for input_ in (q, k, v):
        assert table(q, k, v, input_) is None
    both = torch.zeros(3, *SHAPE[1:], dtype=torch.float16)
    assert table(both[:2], k, v, both[1:]) is None  # half of it overlaps


# ---------------------------------------------------------------- what is not the same call
def misaligned(x):
    return torch.cat((x.flatten(), x.new_zeros(1)))[1:].view(x.shape)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:1],
        lambda x: x.bfloat16(),
        lambda x: x.float(),
        lambda x: x.transpose(1, 2),
        lambda x: x.flatten(),
        lambda x: x[None],
        misaligned,
        lambda x: x.to("meta"),
        lambda x: x.to_sparse(),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        torch._neg_view,
        lambda x: x.clone().requires_grad_(),
        lambda x: None,
        lambda x: x.numpy(),
        lambda x: "text",
    ],
)
@pytest.mark.parametrize("place", range(3))
def test_another_tensor_is_another_call(devices, echo, change, place):
    table = remembered(echo, inputs(), torch.empty(SHAPE, dtype=torch.float16))
    given = inputs()
    given[place] = change(given[place])
    assert table(*given) is None
    assert table(*inputs()) is not None


def test_gradients_are_asked_for_in_every_call(devices, echo):
    table = remembered(echo, inputs(), torch.empty(SHAPE, dtype=torch.float16))
    q, k, v = inputs()
    q.requires_grad_()
    assert table(q, k, v) is None
    with torch.no_grad():
        assert table(q, k, v) is not None


def test_wrong_numbers_of_arguments(devices, echo):
    table = remembered(echo, inputs(), torch.empty(SHAPE, dtype=torch.float16))
    for given in ([], inputs()[:2], [*inputs(), *[None] * 5, 1, 2, 3]):
        assert table(*given) is None
    with pytest.raises(TypeError, match="no keywords"):
        table(*inputs(), o=None)


# ---------------------------------------------------------------- what is not remembered
def test_launch_on_a_copy_is_not_remembered(devices, echo):
    table, o = binding.CallTable(), torch.empty(SHAPE, dtype=torch.float16)
    q, k, v = inputs()
    for views in ((q.clone(), k, v), (q, k, v.clone())):
        launch = arguments(*views, o)
        assert not table.remember(
            (q, k, v), (o, None, None), (maker(SHAPE), None, None), echo.launch, launch, 0, ""
        )
    launch = arguments(q, k, v, o.clone())
    assert not table.remember(
        (q, k, v), (o, None, None), (maker(SHAPE), None, None), echo.launch, launch, 0, ""
    )
    assert len(table) == 0


def test_remember_refuses_nonsense(devices, echo):
    table, (q, k, v) = binding.CallTable(), inputs()
    launch = arguments(q, k, v, q)
    with pytest.raises(TypeError, match="not the launch of a Kernel"):
        table.remember((q, k, v), (None,) * 3, (None,) * 3, print, launch, 0, "")
    with pytest.raises(TypeError, match="tuples of 3"):
        table.remember((q, k, v), (None,), (None,), echo.launch, launch, 0, "")
    with pytest.raises(TypeError, match="wanted launch"):
        table.remember((q, k, v), (None,) * 3, (None,) * 3, echo.launch, (1, 2), 0, "")


def test_tables_are_bounded(devices, echo):
    table = binding.CallTable()
    for n in range(1, 600):
        shape = (1, n, 1, 64)
        q, k, v = inputs(shape)
        o = torch.empty(shape, dtype=torch.float16)
        made, makers = (o, None, None), (maker(shape), None, None)
        assert table.remember((q, k, v), made, makers, echo.launch, arguments(q, k, v, o), 0, n)
        assert len(table) <= 256
    assert table(q, k, v) is not None


# ---------------------------------------------------------------- devices, errors, threads
def test_device_of_the_call_is_current_while_it_runs(devices, echo):
    table = remembered(echo, inputs(), torch.empty(SHAPE, dtype=torch.float16), device=3)
    assert table(*inputs()) is not None
    assert (devices.entered, devices.current) == ([3, 0], 0)
    devices.current = 3
    assert table(*inputs()) is not None
    assert devices.entered[2:] == [3]


def test_failed_launch_goes_the_long_way(devices, echo):
    o = torch.empty(SHAPE, dtype=torch.float16)
    q, k, v = inputs()
    table, launch = binding.CallTable(), list(arguments(q, k, v, o))
    launch[12] = 0  # the kernel refuses this scale
    assert table.remember(
        (q, k, v), (o, None, None), (maker(SHAPE), None, None), echo.launch, tuple(launch), 0, ""
    )
    assert table(q, k, v) is None
    assert table.last is None


def test_error_while_an_output_is_made_is_raised(devices, echo):
    def out_of_memory():
        raise MemoryError("no room")

    table, (q, k, v), o = binding.CallTable(), inputs(), torch.empty(SHAPE, dtype=torch.float16)
    launch = arguments(q, k, v, o)
    table.remember((q, k, v), (o, None, None), (out_of_memory, None, None), echo.launch, launch, 2, "")
    with pytest.raises(MemoryError, match="no room"):
        table(q, k, v)
    assert devices.current == 0


def test_threads_share_a_table_that_fills_up(devices, echo):
    table, failures = remembered(echo, inputs(), torch.empty(SHAPE, dtype=torch.float16)), []

    def work(seed):
        for n in range(300):
            shape = (1, 4 + n, 1 + seed, 64)
            q, k, v = inputs(shape)
            o = torch.empty(shape, dtype=torch.float16)
            launch = arguments(q, k, v, o)
            table.remember((q, k, v), (o, None, None), (maker(shape), None, None), echo.launch, launch, 0, n)
            again = table(q, k, v)
            if again is not None and seen(again).q != q.data_ptr():
                failures.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_tables_keep_no_tensor_and_give_back_what_they_hold(devices, echo):
    import gc
    import weakref

    class Label:
        pass

    label, given, o = Label(), inputs(), torch.empty(SHAPE, dtype=torch.float16)
    table = remembered(echo, given, o, label)
    alive = [weakref.ref(x) for x in (*given, o, label)]
    result = table(*given)
    alive.append(weakref.ref(result))
    del given, o, result, label
    gc.collect()
    assert [x() is None for x in alive] == [True] * 4 + [False, True]
    del table
    assert alive[4]() is None


# ---------------------------------------------------------------- tensors without memory
def test_storage_that_was_resized_away_is_not_known(devices, echo):
    """A view into it has its offset for an address, which looks like memory."""

    def views():
        return [torch.zeros(2, 9, 4, 64).half()[:, 1:] for _ in range(3)]

    table = remembered(echo, views(), torch.empty(SHAPE, dtype=torch.float16))
    assert table(*views()) is not None
    for place in range(3):
        given = views()
        given[place].untyped_storage().resize_(0)
        assert given[place].data_ptr() == 2 * given[place].storage_offset() > 0
        assert table(*given) is None


def test_wrappers_are_not_known(devices, echo):
    table = remembered(echo, inputs(), torch.empty(SHAPE, dtype=torch.float16))
    q, k, v = inputs()
    assert table(torch._to_functional_tensor(q), k, v) is None
    torch.func.vmap(lambda x: x if table(x, k, v) is None else 1 / 0)(q[None])
    assert table(q, k, v) is not None
