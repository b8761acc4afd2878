"""How calls are launch_cache, with tables that a test can look into."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

from flash_attention import attention, forward, last_kernel, prepare
from flash_attention.run import launch_cache
from flash_helpers import generation
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, ForwardKernel

CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 64, 4, True, True, True, 0, 2, 2, True, True)
KERNEL = ForwardKernel(CONFIG)
KEY = ("attention", False, None, (None, None), 0.0, False)
LAUNCHED = SimpleNamespace(launch=print, arguments=())


class Table:
    """Knows what it was told of, by its first tensor's shape."""

    def __init__(self):
        self.told, self.last = {}, None

    def remember(self, given, made, makers, launch, arguments, device, label):
        self.told[given[0].shape] = label

    def call(self, q, *rest):
        self.last = self.told.get(q.shape, self.last)
        return q + 1 if q.shape in self.told else None


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    backend = SimpleNamespace(call_table=lambda direction: Table(), maker_like=lambda x: x.clone)
    monkeypatch.setattr(launch_cache, "backend", lambda name: backend)
    launch_cache.forget()
    yield
    launch_cache.forget()


def remember(q, key=KEY, config=None, kernel=KERNEL):
    launch_cache.remember(key, (q, q, q, None, None), (config,), kernel, LAUNCHED, (q, None, None))


def test_a_call_like_an_earlier_one_is_repeated():
    q = torch.zeros(1, 8, 2, 64)
    assert launch_cache.repeat(KEY, q, q, q) is None
    remember(q)
    assert launch_cache.repeat(KEY, q, q, q).sum() == q.numel()
    assert launch_cache.repeat(("attention_varlen", *KEY[1:]), q, q, q) is None
    assert launch_cache.repeat(KEY, q[:, 1:], q, q) is None
    launch_cache.forget()
    assert launch_cache.repeat(KEY, q, q, q) is None


@pytest.mark.parametrize("place", range(1, len(KEY)))
def test_every_option_tells_calls_apart(place):
    q = torch.zeros(1, 8, 2, 64)
    remember(q)
    other = [*KEY]
    other[place] = ["text", True, 0.5, (3, None), 30.0, True, id(CONFIG), "cuda", True][place]
    assert launch_cache.repeat(tuple(other), q, q, q) is None


def test_options_that_may_change_are_not_remembered():
    q, scale = torch.zeros(1, 8, 2, 64), torch.tensor(0.5)
    key = (*KEY[:2], scale, *KEY[3:])
    remember(q, key)
    assert launch_cache.repeat(key, q, q, q) is None
    assert launch_cache.repeat((*KEY[:3], [None, None], *KEY[4:]), q, q, q) is None  # cannot be hashed


def test_tables_are_bounded_and_hold_their_configurations():
    q = torch.zeros(1, 8, 2, 64)
    for n in range(3 * launch_cache.MAX_TABLES):
        remember(q, (*KEY[:2], float(n), *KEY[3:]), CONFIG)
        assert len(launch_cache._tables) <= launch_cache.MAX_TABLES
    assert all(configs == (CONFIG,) for *_, configs in launch_cache._tables.values())


def test_no_other_configuration_gets_the_id_of_a_remembered_one():
    q = torch.zeros(1, 64, 2, 64)

    def new_config():
        return FlashForwardKernelConfig(*(getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__))

    for _ in range(20):  # each would take the place of the one before, were that gone
        config = new_config()
        assert launch_cache.repeat_forward(config, q, q, q, None) is None
        remember(q, (id(config),), config)
        del config


def test_tangents_are_not_repeated():
    q = torch.zeros(1, 8, 2, 64)
    remember(q)
    remember(q, (id(CONFIG),), CONFIG)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        assert launch_cache.repeat(KEY, dual, q, q) is None
        assert launch_cache.repeat_forward(CONFIG, dual, q, q, None) is None
    assert launch_cache.repeat(KEY, q, q, q) is not None


def test_a_trace_holds_the_operator_and_not_a_repeated_call():
    q = torch.randn(1, 8, 2, 64).half()
    key = ("attention", True, *KEY[2:])
    remember(q, key)
    assert attention(q, q, q, causal=True)[0, 0, 0, 0] == q[0, 0, 0, 0] + 1  # what the table gives
    traced = torch.jit.trace(lambda x: attention(x, x, x, causal=True), q, check_trace=False)
    assert "flash_attention::attention" in str(traced.graph)
    launch_cache.forget()
    torch.testing.assert_close(traced(2 * q), attention(2 * q, 2 * q, 2 * q, causal=True), atol=0, rtol=0)


def test_a_trace_of_forward_holds_the_operator():
    q = torch.randn(1, 64, 2, 64).half()
    remember(q, (id(CONFIG),), CONFIG)
    assert forward(CONFIG, q, q, q)[0, 0, 0, 0] == q[0, 0, 0, 0] + 1  # what the table gives
    traced = torch.jit.trace(lambda x: forward(CONFIG, x, x, x), q, check_trace=False)
    assert "flash_attention::attention" in str(traced.graph)
    assert CONFIG.short_form() in str(traced.graph)
    launch_cache.forget()
    assert torch.equal(traced(2 * q), forward(CONFIG, 2 * q, 2 * q, 2 * q))
    with pytest.raises(ValueError, match="multiple of B_r"):
        torch.jit.trace(lambda x: forward(CONFIG, x, x, x), q[:, :60], check_trace=False)


def test_last_kernel_is_that_of_the_latest_call():
    q = torch.zeros(1, 8, 2, 64)
    other = ForwardKernel(CONFIG.__class__(DType.BF16, *(64, 64, 64, 4), *(True,) * 3, 0, 2, 2, True, True))
    remember(q)
    remember(q[:, 1:], kernel=other)
    for x, kernel in ((q, KERNEL), (q[:, 1:], other), (q, KERNEL)):
        launch_cache.repeat(KEY, x, x, x)
        assert last_kernel() is kernel
    half = q[:, 2:].half()
    attention(half, half, half)
    assert last_kernel() not in (KERNEL, other)
    table, *_ = launch_cache._tables[KEY]
    table.told[half.shape] = KERNEL
    launch_cache.repeat(KEY, half, half, half)
    assert last_kernel() is KERNEL


def test_forward_is_found_by_its_configuration_alone():
    q = torch.zeros(1, 64, 2, 64)
    twin = FlashForwardKernelConfig(*(getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__))
    remember(q, (id(CONFIG),), CONFIG)
    latest = last_kernel()
    assert launch_cache.repeat_forward(CONFIG, q, q, q, None) is not None
    assert (
        launch_cache.repeat_forward(twin, q, q, q, None) is None
    )  # equal, but its fields' types are not checked
    assert last_kernel() is latest


def test_a_new_generation_forgets():
    q = torch.zeros(1, 8, 2, 64)
    remember(q)
    prepare([])
    assert launch_cache.repeat(KEY, q, q, q) is None


def test_what_an_earlier_generation_chose_is_not_remembered():
    q, chosen_in = torch.zeros(1, 8, 2, 64), generation.number()
    generation.begin()
    given = (q, q, q, None, None)
    launch_cache.remember(KEY, given, (), KERNEL, LAUNCHED, (q, None, None), chosen_in)
    assert launch_cache.repeat(KEY, q, q, q) is None
    launch_cache.remember(KEY, given, (), KERNEL, LAUNCHED, (q, None, None), generation.number())
    assert launch_cache.repeat(KEY, q, q, q) is not None


def test_a_cpu_call_is_never_remembered():
    q = torch.zeros(1, 8, 2, 64, dtype=torch.float16)
    for _ in range(2):
        attention(q, q, q)
    assert not launch_cache._tables


def test_windows_are_checked_in_every_call():
    q = torch.zeros(1, 8, 2, 64, dtype=torch.float16)
    attention(q, q, q, window=(1, None))
    for window in ((True, None), (1.0, None)):
        with pytest.raises(TypeError, match="window's left limit"):
            attention(q, q, q, window=window)


# ---------------------------------------------------------------------- gradients
class Twice:
    """Stands for both tables: the forward pass doubles q, and a backward pass gives what it was told of."""

    def __init__(self, direction):
        self.direction, self.told, self.last, self.given = direction, set(), direction, []

    def remember(self, given, made, makers, launch, arguments, device, label):
        self.told.add(given[0].shape)

    def call(self, *given):
        records = torch.is_grad_enabled() and any(torch.is_tensor(x) and x.requires_grad for x in given)
        if records or given[0].shape not in self.told:
            return None
        self.given.append(given)
        q, k, v, *_ = given
        if self.direction == "forward":
            return 2 * q.detach(), q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        return 2 * given[5], torch.zeros_like(k), torch.zeros_like(v), None


@pytest.fixture
def both_tables(monkeypatch):
    made = {}

    def call_table(direction):
        return made.setdefault(direction, Twice(direction))

    monkeypatch.setattr(
        launch_cache,
        "backend",
        lambda name: SimpleNamespace(call_table=call_table, maker_like=lambda x: x.clone),
    )
    x = torch.zeros(1, 8, 2, 64, dtype=torch.float16)
    launch_cache.remember(
        launch_cache.with_lse(("attention", True, *KEY[2:])),
        (x, x, x, None, None),
        None,
        KERNEL,
        LAUNCHED,
        (x,),
    )
    return made


def remember_gradients(x, *wanted, deterministic=False, **options):
    key = launch_cache.of_gradients(("attention", True, *KEY[2:]), *wanted, deterministic)
    given = (x, x, x, x, x, x, None)
    launch_cache.remember(key, given, (), KERNEL, LAUNCHED, (x,) * 4, direction="backward", **options)


def leaf():
    return torch.randn(1, 8, 2, 64, generator=torch.Generator().manual_seed(1)).half().requires_grad_()


def test_a_recorded_call_and_its_gradients_are_repeated(both_tables):
    remember_gradients(leaf(), True, True, True)
    q, k, v = leaf(), leaf(), leaf()
    out = attention(q, k, v, causal=True)
    assert torch.equal(out, 2 * q)
    assert out.requires_grad
    dout = torch.randn_like(out)
    dq, *_ = torch.autograd.grad(out, (q, k, v), dout)
    assert torch.equal(dq, 2 * dout)
    ((*_, seen_dout, seen_dlse),) = both_tables["backward"].given
    assert seen_dlse is None
    assert torch.equal(seen_dout, dout)
    assert last_kernel() == "forward"  # of that table


def test_what_is_wanted_and_how_tells_passes_apart(both_tables):
    remember_gradients(leaf(), True, False, False)
    remember_gradients(leaf(), True, True, True, deterministic=True)
    passes_made = both_tables["backward"].given
    other, q = leaf().detach(), leaf()
    attention(q, other, other, causal=True).sum().backward()
    assert len(passes_made) == 1
    k = leaf()
    for _ in range(2):  # on the CPU no long way is remembered
        attention(q, k, other, causal=True).sum().backward()
    assert len(passes_made) == 1
    out = attention(q, k, leaf(), causal=True)
    torch.use_deterministic_algorithms(True)
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(passes_made) == 2


def test_a_changed_tensor_is_an_error_on_the_short_way(both_tables):
    remember_gradients(leaf(), True, True, True)
    q, k, v = leaf(), leaf(), leaf()
    between = k * 1
    out = attention(q, between, v, causal=True)
    between.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert not both_tables["backward"].given


def test_a_second_derivative_of_a_repeated_call_is_refused(both_tables):
    remember_gradients(leaf(), True, True, True)
    q = leaf()
    (dq,) = torch.autograd.grad(attention(q, leaf(), leaf(), causal=True).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="a gradient of attention's gradients"):
        torch.autograd.grad(dq.sum(), q)


def test_a_loss_that_does_not_use_the_output_takes_the_long_way(both_tables):
    remember_gradients(leaf(), True, True, True)
    q, k, v = leaf(), leaf(), leaf()
    key = launch_cache.with_lse(("attention", True, *KEY[2:]))
    assert launch_cache._tables[key]
    _, lse = attention(q, k, v, causal=True, return_lse=True)
    *_, dv = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    assert not dv.any()
    assert not both_tables["backward"].given


def test_a_call_that_records_nothing_is_not_repeated_as_a_recorded_one(both_tables):
    q = leaf().detach()
    out = attention(q, q, q, causal=True)
    assert not out.requires_grad
    assert not torch.equal(out, 2 * q)  # what the table gives
    with torch.no_grad():
        assert not torch.equal(attention(leaf(), q, q, causal=True), 2 * leaf())


@pytest.mark.parametrize("option", [{"n_sms": 3}, {"out": torch.empty(1, 8, 2, 64, dtype=torch.float16)}])
def test_what_has_no_gradient_is_refused_before_it_is_looked_up(both_tables, option):
    with pytest.raises(NotImplementedError, match="a gradient is wanted"):
        attention(leaf(), leaf(), leaf(), causal=True, **option)


def test_transforms_of_functions_go_the_long_way(both_tables):
    k = leaf().detach()
    found = torch.func.grad(lambda q: attention(q, k, k, causal=True).float().square().sum())(k)
    assert found.any()
    assert not both_tables["forward"].given
