"""The lines about gradients of docs/contract.md: the tests of line Cnn are named test_cnn_…"""

from __future__ import annotations

import gc
import itertools
import math
from typing import Any

import pytest
import torch
import unwritten
from torch import Tensor

import flash_attention
from flash_attention import attention_varlen, merge
from flash_attention.cached import attention_cached
from flash_attention.errors import NoKernelError
from flash_attention.run import launch_cache, passes
from flash_helpers.test.gradients import check_gradients
from flash_helpers.test.reference import reference, reference_gradients

HALF, BFLOAT = torch.float16, torch.bfloat16
NAMES = ("dq", "dk", "dv", "dsinks")
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal, fewer keys": {"causal": True, "seq_len_q": 150, "seq_len_k": 70},
    "causal, more keys": {"causal": True, "seq_len_q": 33, "seq_len_k": 200},
    "window": {"window": (40, 3)},
    "window to the left": {"window": (20, None)},
    "window to the right": {"window": (None, 7)},
    "causal window": {"causal": True, "window": (31, None), "seq_len_q": 200, "seq_len_k": 170},
    "soft cap": {"softcap": 2.0},
    "causal soft cap": {"causal": True, "softcap": 2.0},
    "sinks": {"sinks": True},
    "sinks, causal, fewer keys": {"sinks": True, "causal": True, "seq_len_q": 150, "seq_len_k": 70},
    "sinks in 16 bit": {"sinks": True, "sinks_in_16_bit": True},
    "grouped heads": {"n_heads": 6, "n_heads_kv": 2},
    "grouped heads, causal": {"n_heads": 6, "n_heads_kv": 2, "causal": True, "batch": 3},
    "one kv head": {"n_heads": 5, "n_heads_kv": 1, "causal": True},
    "head sizes 40/72": {"d_head": 40, "d_head_v": 72},
    "head sizes 192/128": {"d_head": 192, "d_head_v": 128, "causal": True},
    "diagonal further right": {"causal": True, "diagonal_offset": 9, "seq_len_k": 170},
    "diagonal further left": {"causal": True, "diagonal_offset": -30},
    "window before the diagonal": {"window": (40, -3)},
    "window behind the diagonal": {"window": (-2, 20), "seq_len_k": 200},
    "negative scale": {"softmax_scale": -0.3, "causal": True},
    "zero scale": {"softmax_scale": 0.0},
    "everything": {
        "causal": True, "window": (90, None), "softcap": 3.0, "sinks": True, "n_heads": 4, "n_heads_kv": 2,
        "d_head": 24, "d_head_v": 56, "seq_len_q": 100, "seq_len_k": 180,
    },
}  # fmt: skip


class Inputs:
    """Tensors of a call that want gradients, and gradients of its results."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype = BFLOAT,
        batch: int = 2,
        seq_len_q: int = 130,
        seq_len_k: int = 130,
        n_heads: int = 2,
        n_heads_kv: int = 2,
        d_head: int = 64,
        d_head_v: int | None = None,
        sinks: bool = False,
        sinks_in_16_bit: bool = False,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        d_head_v = d_head if d_head_v is None else d_head_v

        def randn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.q = randn(batch, seq_len_q, n_heads, d_head)
        self.k = randn(batch, seq_len_k, n_heads_kv, d_head)
        self.v = randn(batch, seq_len_k, n_heads_kv, d_head_v)
        self.sinks = randn(n_heads, dtype=dtype if sinks_in_16_bit else torch.float32) if sinks else None
        self.dout = randn(batch, seq_len_q, n_heads, d_head_v)
        self.dlse = randn(batch, n_heads, seq_len_q, dtype=torch.float32)
        self.options = options
        self.out: Tensor | None = None  # of the latest call of ``gradients``

    def leaves(self) -> list[Tensor]:
        given = (self.q, self.k, self.v, self.sinks)
        return [x.detach().requires_grad_() for x in given if x is not None]

    def results(self, leaves: list[Tensor], **more: Any) -> Any:
        if self.sinks is not None:
            more = {"sinks": leaves[3], **more}
        return attend(*leaves[:3], **self.options, **more)

    def gradients(self, dlse: Tensor | None = None, **more: Any) -> dict[str, Tensor]:
        """With an LSE only where it has a gradient."""
        leaves = self.leaves()
        self.fill_unwritten()
        results = self.results(leaves, return_lse=dlse is not None, **more)
        self.fill_unwritten()
        self.out = (results if dlse is None else results[0]).detach()
        if dlse is None:
            found = torch.autograd.grad(results, leaves, self.dout)
        else:
            found = torch.autograd.grad(results, leaves, (self.dout, dlse))
        return dict(zip(NAMES, found, strict=False))

    def fill_unwritten(self) -> None:
        """What a kernel reads without writing it is NaN."""
        if self.q.is_cuda:
            unwritten.fill_with_nan()

    def expected(self, dlse: Tensor | None = None) -> dict[str, Tensor]:
        grads = reference_gradients(self.q, self.k, self.v, self.dout, dlse, sinks=self.sinks, **self.options)
        return {name: value for name, value in grads._asdict().items() if value is not None}

    def check(self, dlse: Tensor | None = None, few_keys: bool = False, **more: Any) -> None:
        self.compare(self.gradients(dlse, **more), dlse, few_keys)

    def compare(self, found: dict[str, Tensor], dlse: Tensor | None, few_keys: bool = False) -> None:
        """With float64 and the error of PyTorch's eager attention."""
        tensors = self.q, self.k, self.v, self.dout, dlse
        check_gradients(found, *tensors, few_keys=few_keys, out=self.out, sinks=self.sinks, **self.options)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return _unless_there_is_no_kernel(flash_attention.attention, q, k, v, **options)


def _unless_there_is_no_kernel(function: Any, q: Tensor, *arguments: Any, **options: Any) -> Any:
    """A test of what no CUDA kernel has yet is skipped there, and nowhere else."""
    try:
        return function(q, *arguments, **options)
    except NoKernelError as error:
        assert q.is_cuda
        pytest.skip(f"no CUDA kernel yet: {error}")


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, grad in found.items():
        assert torch.equal(grad, expected[name]), name


# ---------------------------------------------------------------------- C17: what records gradients
@pytest.mark.parametrize("which", range(4), ids=("q", "k", "v", "sinks"))
def test_c17_what_requires_grad_gets_it_and_nothing_else(device: str, which: int) -> None:
    inputs = Inputs(device, sinks=True, causal=True)
    every = inputs.gradients()
    leaves = inputs.leaves()
    for i, x in enumerate(leaves):
        x.requires_grad_(i == which)
    out = inputs.results(leaves)
    assert out.requires_grad
    out.backward(inputs.dout)
    for i, (name, x) in enumerate(zip(NAMES, leaves, strict=True)):
        if i == which:
            assert x.grad is not None
            assert torch.equal(x.grad, every[name])
        else:
            assert x.grad is None


def test_c17_the_output_is_that_of_a_call_without_gradients(device: str) -> None:
    for name in ("plain", "causal", "everything"):
        inputs = Inputs(device, **CASES[name])
        leaves = inputs.leaves()
        for return_lse in (False, True):
            recorded = inputs.results(leaves, return_lse=return_lse)
            with torch.no_grad():
                plain = inputs.results(leaves, return_lse=return_lse)
            if not return_lse:
                recorded, plain = (recorded,), (plain,)
            for x, y in zip(recorded, plain, strict=True):
                assert torch.equal(x, y)
                assert x.requires_grad and not y.requires_grad  # noqa: PT018


def test_c17_no_grad_and_inference_mode_record_nothing(device: str) -> None:
    inputs = Inputs(device)
    leaves = inputs.leaves()
    with torch.no_grad():
        assert not inputs.results(leaves).requires_grad
    with torch.inference_mode():
        assert inputs.results(leaves).is_inference()
    assert not inputs.results([x.detach() for x in leaves]).requires_grad


@pytest.mark.parametrize("option", ["softmax_scale", "softcap"])
def test_c17_a_number_has_no_gradient(device: str, option: str) -> None:
    inputs = Inputs(device, seq_len_q=8, seq_len_k=8)
    leaves = [x.detach() for x in inputs.leaves()]
    learnt = torch.tensor(0.25, requires_grad=True)
    with pytest.raises(NotImplementedError, match=rf"^{option} requires grad.*pass {option}\.detach"):
        inputs.results(leaves, **{option: learnt})
    expected = inputs.results(leaves, **{option: 0.25})
    assert torch.equal(inputs.results(leaves, **{option: learnt.detach()}), expected)
    with torch.no_grad():
        assert torch.equal(inputs.results(leaves, **{option: learnt}), expected)


def test_c17_an_output_that_is_given_has_no_gradient(device: str) -> None:
    inputs = Inputs(device)
    out = torch.empty_like(inputs.dout)
    with pytest.raises(NotImplementedError, match=r"out=.*pass out=None"):
        inputs.results(inputs.leaves(), out=out)
    with torch.no_grad():
        assert inputs.results(inputs.leaves(), out=out) is out
    with pytest.raises(NotImplementedError, match=r"^out requires grad.*pass out=None"):
        inputs.results([x.detach() for x in inputs.leaves()], out=out.clone().requires_grad_())


def test_c17_pages_have_no_gradient(device: str) -> None:
    q, pages = (torch.zeros(n, 16, 2, 64, dtype=HALF, device=device) for n in (1, 2))
    table, used = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[1, 0]], [20]))
    with pytest.raises(NotImplementedError, match=r"block_table.*no_grad.*without block_table"):
        attention_cached(q.requires_grad_(), pages, pages, used, block_table=table)
    with torch.no_grad():
        attention_cached(q, pages, pages, used, block_table=table)


WAY_OUT = r"sdpa_kernel\(SDPBackend\.MATH\)"


def test_c17_second_derivatives_are_refused(device: str) -> None:
    inputs = Inputs(device, seq_len_q=8, seq_len_k=8)
    leaves = inputs.leaves()
    grads = torch.autograd.grad(inputs.results(leaves), leaves, inputs.dout, create_graph=True)
    equal(dict(zip(NAMES, grads, strict=False)), inputs.gradients())
    with pytest.raises(NotImplementedError, match=f"gradient of attention's gradients.*{WAY_OUT}"):
        grads[0].float().sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_c17_tangents_are_refused(device: str, name: str) -> None:
    inputs = Inputs(device, seq_len_q=8, seq_len_k=8)
    given = dict(zip("qkv", (x.detach() for x in inputs.leaves()), strict=True))
    expected = attend(**given)
    with torch.autograd.forward_ad.dual_level():
        x = given[name]
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=f"^{name} has a tangent.*{WAY_OUT}"):
            attend(**{**given, name: dual})
        assert torch.equal(attend(**given), expected)
    with pytest.raises(NotImplementedError, match=f"tangent.*{WAY_OUT}"):
        torch.func.jvp(lambda x: attend(**{**given, name: x}), (given[name],), (given[name],))


def test_c17_vmap_is_refused(device: str) -> None:
    inputs = Inputs(device, seq_len_q=8, seq_len_k=8)
    q, k, v = (x.detach()[None] for x in inputs.leaves())

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v).float().sum()

    for function in (loss, torch.func.grad(loss)):
        with pytest.raises(NotImplementedError, match=f"vmap.*batch dimension.*{WAY_OUT}"):
            torch.func.vmap(function)(q, k, v)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("of", ["out", "lse"])
def test_c17_many_gradients_at_once_are_refused(device: str, of: str, autocast: bool) -> None:
    """Autograd's own vmap hands over tensors without memory of their own."""
    inputs = Inputs(device, seq_len_q=8, seq_len_k=8)
    leaves = [x.detach().float().requires_grad_() if autocast else x for x in inputs.leaves()]
    for _ in range(2):  # on a GPU the second call is a remembered one
        with torch.autocast(device, dtype=BFLOAT, enabled=autocast):
            out, lse = inputs.results(leaves, return_lse=True)
        result = out if of == "out" else lse
        many = torch.ones(3, *result.shape, dtype=result.dtype, device=device)
        with pytest.raises(NotImplementedError, match=f"vmap.*is_grads_batched.*batch dimension.*{WAY_OUT}"):
            torch.autograd.grad(result, leaves[0], many, retain_graph=True, is_grads_batched=True)
        result.backward(many[0])
    assert leaves[0].grad is not None


# ---------------------------------------------------------------------- C40: what is computed
@pytest.mark.parametrize("with_lse", [False, True], ids=["", "lse"])
@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_c40_every_option(device: str, case: str, dtype: torch.dtype, with_lse: bool) -> None:
    inputs = Inputs(device, dtype, **CASES[case])
    inputs.check(inputs.dlse if with_lse else None)


@pytest.mark.parametrize("d_head", range(8, 257, 8))
def test_c40_every_head_size(device: str, d_head: int) -> None:
    Inputs(device, HALF, 1, 40, 70, 2, 1, d_head, causal=True).check()
    inputs = Inputs(device, BFLOAT, 1, 33, 70, 1, 1, d_head, 264 - d_head, softcap=4.0)
    inputs.check(inputs.dlse)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [*itertools.product((0, 1, 2, 17, 65), (0, 1, 3, 64, 129))], ids=str)
def test_c40_every_length(device: str, lengths: tuple[int, int], causal: bool) -> None:
    inputs = Inputs(device, HALF, seq_len_q=lengths[0], seq_len_k=lengths[1], causal=causal)
    inputs.check()
    inputs.check(inputs.dlse)


@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=["bf16", "fp16"])
def test_c40_weight_on_one_key(device: str, dtype: torch.dtype) -> None:
    """Scores of up to 250, capped or not: most queries give one key nearly all their weight."""
    for options in ({"causal": True, "softcap": 20.0, "sinks": True}, {"causal": True}):
        inputs = Inputs(device, dtype, 2, 125, 128, 2, 1, 240, 48, softmax_scale=1.0, **options)
        inputs.q, inputs.k = inputs.q * 4, inputs.k * 4
        inputs.check(inputs.dlse, few_keys=True)


def test_c40_an_output_in_float32(device: str) -> None:
    """Its gradient is float32, too, and is rounded to the type of the inputs before products."""
    inputs = Inputs(device, causal=True)
    inputs.dout = inputs.dout.float()
    found = inputs.gradients(out_dtype=torch.float32)
    for (name, grad), right in zip(found.items(), inputs.expected().values(), strict=True):
        assert grad.dtype is BFLOAT, name
        torch.testing.assert_close(grad.double(), right, atol=6e-2, rtol=2e-2)


def test_c40_long_sequences(device: str) -> None:
    """The sums of dK and dV go over thousands of queries, and are rounded once."""
    for options in ({"causal": True}, {"window": (700, 0)}, {}):
        Inputs(device, BFLOAT, 1, 2500, 2500, 2, 1, 32, **options).check()


@pytest.mark.parametrize("factor", [3.0, 30.0])
def test_c40_large_scores_give_finite_gradients(device: str, factor: float) -> None:
    inputs = Inputs(device, HALF, causal=True)
    inputs.q, inputs.k = inputs.q * factor, inputs.k * factor
    assert all(grad.isfinite().all() for grad in inputs.gradients().values())


@pytest.mark.parametrize("d_head", [16, 64])
def test_c40_sequences_of_one_key(device: str, d_head: int) -> None:
    """The softmax over one key is constant: q and k have no gradient, and v has that of the output."""
    inputs = Inputs(device, HALF, seq_len_q=5, seq_len_k=1, d_head=d_head)
    found = inputs.gradients()
    for name in ("dq", "dk"):
        assert found[name].abs().max() <= 2e-2  # what is left of the output's rounding
    torch.testing.assert_close(
        found["dv"], inputs.dout.float().sum(1, keepdim=True).half(), atol=2e-3, rtol=2e-3
    )


# ---------------------------------------------------------------------- C41: the LSE
@pytest.mark.parametrize("case", ["plain", "causal, fewer keys", "sinks", "everything"])
def test_c41_a_loss_of_the_lse_alone(device: str, case: str) -> None:
    inputs = Inputs(device, **CASES[case])
    leaves = inputs.leaves()
    _, lse = inputs.results(leaves, return_lse=True)
    found = torch.autograd.grad(lse, leaves, inputs.dlse)
    assert not found[2].any()
    inputs.dout.zero_()
    inputs.compare(dict(zip(NAMES, found, strict=False)), inputs.dlse)


@pytest.mark.parametrize("case", ["plain", "sinks", "everything"])
def test_c41_an_lse_that_no_loss_uses_changes_no_bit(device: str, case: str) -> None:
    inputs = Inputs(device, **CASES[case])
    leaves = inputs.leaves()
    out, lse = inputs.results(leaves, return_lse=True, deterministic=True)
    unused = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
    zero = torch.autograd.grad((out, lse), leaves, (inputs.dout, torch.zeros_like(inputs.dlse)))
    for x, y in zip(unused, zero, strict=True):
        assert torch.equal(x, y)


def test_c41_parts_that_are_merged(device: str) -> None:
    """The gradients of attention over all keys follow from those over parts of them."""
    inputs = Inputs(device, HALF, seq_len_q=50, seq_len_k=200)
    leaves = inputs.leaves()
    q, k, v = leaves
    parts = [
        attend(q, k[:, keys], v[:, keys], return_lse=True)
        for keys in (slice(0, 64), slice(64, 65), slice(65, 200))
    ]
    out, lse = merge(*zip(*parts, strict=True))
    found = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    for name, grad, right in zip(NAMES, found, inputs.expected(inputs.dlse).values(), strict=False):
        torch.testing.assert_close(grad.double(), right, atol=4e-3, rtol=4e-3, msg=name)


# ---------------------------------------------------------------------- C42: what is asked for
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the tensors lie for whose gradients a backward pass makes room, from now on."""
    launch_cache.forget()  # a remembered launch makes its tensors unseen
    room_for = passes.room_for
    made: list[int] = []

    def seen_room_for(x: Tensor) -> Tensor:
        made.append(x.data_ptr())
        return room_for(x)

    monkeypatch.setattr(passes, "room_for", seen_room_for)
    return made


@pytest.mark.parametrize(
    "wanted", [w for n in (1, 2, 3) for w in itertools.combinations(range(4), n)], ids=str
)
def test_c42_only_what_is_asked_for_is_computed(
    device: str, wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is made: there is no room for a gradient of the others."""
    inputs = Inputs(device, **CASES["everything"])
    every = inputs.gradients(inputs.dlse, deterministic=True)
    leaves = inputs.leaves()
    results = inputs.results(leaves, return_lse=True, deterministic=True)
    made = rooms(monkeypatch)
    some = torch.autograd.grad(results, [leaves[i] for i in wanted], (inputs.dout, inputs.dlse))
    assert made == [leaves[i].data_ptr() for i in wanted]
    for i, grad in zip(wanted, some, strict=True):
        assert torch.equal(grad, every[NAMES[i]])


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_c42_what_a_backward_pass_leaves_out(
    device: str, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``backward(inputs=…)``, and tensors that are made of others; under autocast by the operator."""
    inputs = Inputs(device, causal=True)
    leaves = [x.detach().float().requires_grad_() if autocast else x for x in inputs.leaves()]
    inner = [2 * x for x in leaves]
    with torch.autocast(device, dtype=BFLOAT, enabled=autocast):
        out = inputs.results(inner, deterministic=True)
    every = torch.autograd.grad(out, inner, inputs.dout, retain_graph=True)
    made = rooms(monkeypatch)
    for i, x in enumerate(inner):
        made.clear()
        (found,) = torch.autograd.grad(out, x, inputs.dout, retain_graph=True)
        assert len(made) == 1
        assert torch.equal(found, every[i])
    made.clear()
    out.backward(inputs.dout, inputs=leaves[1:2], retain_graph=True)
    assert len(made) == 1
    assert [x.grad is not None for x in leaves] == [False, True, False]
    assert torch.equal(leaves[1].grad, 2 * every[1])
    made.clear()
    out.backward(inputs.dout)
    assert len(made) == 3
    assert all(x.grad is not None for x in leaves)


# ---------------------------------------------------------------------- C43: exact zeros
def test_c43_keys_that_nobody_sees(device: str) -> None:
    inputs = Inputs(device, window=(10, 0), seq_len_q=30, seq_len_k=300)
    clean = inputs.gradients(deterministic=True)
    inputs.k[:, :260], inputs.v[:, :260] = math.nan, math.nan  # the first query stands at 270
    found = inputs.gradients(deterministic=True)
    equal(found, clean)
    assert not found["dk"][:, :260].any()
    assert not found["dv"][:, :260].any()


def test_c43_keys_that_a_function_hides_from_all_queries(device: str) -> None:
    """They get exactly 0, and what is finite in them has no influence on any other gradient."""
    inputs = Inputs(device, seq_len_q=130, seq_len_k=200)
    mask = {"mask_mod": lambda b, h, q, k: (k % 50 != 20) & (q * 0 < 1)}
    found = []
    for value in (1.0, -300.0):
        inputs.k[:, 20::50], inputs.v[:, 20::50] = value, value
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = attend(*leaves, deterministic=True, **mask)
        found.append(torch.autograd.grad(out, leaves, inputs.dout))
    for first, second in zip(*found, strict=True):
        assert first.equal(second)
    for grad in found[0][1:]:
        assert not grad[:, 20::50].any()
        assert grad[:, 21::50].any()


def test_c43_queries_that_see_no_key(device: str) -> None:
    inputs = Inputs(device, causal=True, seq_len_q=150, seq_len_k=70)
    clean = inputs.gradients(deterministic=True)
    inputs.q[:, :80], inputs.dout[:, :80] = math.nan, math.nan
    found = inputs.gradients(deterministic=True)
    equal(found, clean)
    assert not found["dq"][:, :80].any()


def test_c43_no_keys_and_no_queries(device: str) -> None:
    for sizes in ({"seq_len_k": 0}, {"seq_len_q": 0}, {"batch": 0}):
        inputs = Inputs(device, sinks=True, **sizes)
        assert not any(grad.any() for grad in inputs.gradients().values())
        assert all(grad.isfinite().all() for grad in inputs.gradients(inputs.dlse).values())
    inputs = Inputs(device, sinks=True, seq_len_k=0)
    found = inputs.gradients(inputs.dlse)["dsinks"]  # each LSE is the sink
    expected = inputs.dlse.sum((0, 2))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert inputs.sinks is not None
    inputs.sinks[0] = -math.inf  # no sink
    found = inputs.gradients(inputs.dlse)["dsinks"]
    assert found[0] == 0
    torch.testing.assert_close(found[1:], expected[1:], atol=1e-4, rtol=1e-4)


PACKED = [(33, 70), (0, 5), (40, 0), (1, 1), (5, 2), (64, 64)]


def packed(device: str, spare: int) -> tuple[list[Tensor], list[Tensor], tuple[int, int]]:
    """q, k, v, dout with NaN in ``spare`` rows behind the last sequence; offsets; longest lengths."""
    generator = torch.Generator().manual_seed(1)
    totals = [sum(n) for n in zip(*PACKED, strict=True)]
    tensors = []
    for n, heads in ((totals[0], 4), (totals[1], 2), (totals[1], 2), (totals[0], 4)):
        x = torch.randn(n + spare, heads, 32, generator=generator).half()
        x[n:] = math.nan
        tensors.append(x.to(device))
    offsets = [
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device)
        for n in zip(*PACKED, strict=True)
    ]
    return tensors, offsets, (64, 70)


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window": (9, None), "softcap": 3.0}], ids=str
)
def test_c43_packed_sequences_and_their_padding(device: str, options: dict[str, Any]) -> None:
    (*inputs, dout), offsets, longest = packed(device, spare=7)
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0], device=device)
    leaves = [x.requires_grad_() for x in (*inputs, sinks)]
    out, lse = _unless_there_is_no_kernel(
        attention_varlen, *leaves[:3], *offsets, *longest, sinks=sinks, return_lse=True, **options
    )
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(2)).to(device)
    found = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    dsinks = torch.zeros(4, dtype=torch.float64, device=device)
    first_q, first_k = 0, 0
    for n_q, n_k in PACKED:
        queries, keys = slice(first_q, first_q + n_q), slice(first_k, first_k + n_k)
        right = reference_gradients(
            *(x.detach()[None, rows] for x, rows in zip(inputs, (queries, keys, keys), strict=True)),
            dout[None, queries], dlse[None, :, queries], sinks=sinks.detach(), **options,
        )  # fmt: skip
        for grad, wanted, rows in zip(found, right, (queries, keys, keys), strict=False):
            torch.testing.assert_close(grad[rows].double(), wanted[0], atol=8e-3, rtol=8e-3)
        dsinks += right.dsinks
        first_q, first_k = first_q + n_q, first_k + n_k
    for grad, first in zip(found[:3], (first_q, first_k, first_k), strict=True):
        assert not grad[first:].any()
    torch.testing.assert_close(found[3].double(), dsinks, atol=2e-2, rtol=2e-3)


def test_c43_keys_behind_those_that_are_used(device: str) -> None:
    counts = (0, 5, 64, 100)
    inputs = Inputs(device, HALF, batch=4, seq_len_q=20, seq_len_k=100, n_heads=4, causal=True)
    for item, n in enumerate(counts):
        inputs.k[item, n:], inputs.v[item, n:] = math.nan, math.nan
    used = torch.tensor(counts, dtype=torch.int32, device=device)
    leaves = inputs.leaves()
    out, lse = _unless_there_is_no_kernel(attention_cached, *leaves, used, causal=True, return_lse=True)
    found = torch.autograd.grad((out, lse), leaves, (inputs.dout, inputs.dlse))
    for item, n in enumerate(counts):
        one = slice(item, item + 1)
        right = reference_gradients(
            inputs.q[one],
            inputs.k[one, :n],
            inputs.v[one, :n],
            inputs.dout[one],
            inputs.dlse[one],
            causal=True,
        )
        for grad, wanted, rows in zip(found, right, (20, n, n), strict=False):
            torch.testing.assert_close(grad[one, :rows].double(), wanted, atol=8e-3, rtol=8e-3)
            assert not grad[one, rows:].any()


# ---------------------------------------------------------------------- C44: any strides
def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values in other places of memory."""
    wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 8)
    wide[..., : x.shape[-1]] = x
    return {
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "slice": wide[..., : x.shape[-1]],
        "rows transposed": x.transpose(1, 3).contiguous().transpose(1, 3),
        "offset": torch.cat((x[:1], x))[1:],
    }


@pytest.mark.parametrize("seq_len_k", [130, 170])  # the second needs a mask where PyTorch computes it
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
def test_c44_any_strides(device: str, which: str, seq_len_k: int) -> None:
    inputs = Inputs(device, n_heads=4, causal=True, seq_len_k=seq_len_k)
    expected = inputs.gradients(deterministic=True)
    values = getattr(inputs, which)
    for x in layouts(values).values():
        setattr(inputs, which, x)
        found = inputs.gradients(deterministic=True)
        assert all(grad.shape == expected[name].shape for name, grad in found.items())
        if device == "cpu":
            equal(found, expected)
        for name, grad in found.items():  # other strides may go to another family
            torch.testing.assert_close(grad, expected[name], atol=2e-2, rtol=2e-2)
    setattr(inputs, which, values)


def test_c44_gradients_of_outputs_that_are_one_number(device: str) -> None:
    """``out.sum()`` and ``out.mean()`` give a gradient whose strides are 0."""
    inputs = Inputs(device, HALF)
    leaves = inputs.leaves()
    out, lse = inputs.results(leaves, return_lse=True, deterministic=True)
    dense = torch.autograd.grad(
        (out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)), retain_graph=True
    )
    expanded = torch.autograd.grad(
        (out, lse), leaves, (out.new_ones(()).expand_as(out), lse.new_ones(()).expand_as(lse))
    )
    for x, y in zip(dense, expanded, strict=True):
        assert torch.equal(x, y)


def test_c44_inputs_that_share_memory(device: str) -> None:
    """Keys for all batch items at once, one tensor in three places, and parts of a packed one."""
    inputs = Inputs(device, HALF)
    x = inputs.q.detach().requires_grad_()
    attend(x, x, x).backward(inputs.dout)
    right = reference_gradients(inputs.q, inputs.q, inputs.q, inputs.dout)
    torch.testing.assert_close(x.grad.double(), right.dq + right.dk + right.dv, atol=8e-3, rtol=8e-3)
    k = inputs.k[:1].detach().requires_grad_()
    attend(inputs.q, k.expand(2, -1, -1, -1), inputs.v).backward(inputs.dout)
    shared = reference_gradients(inputs.q, inputs.k[:1].expand(2, -1, -1, -1), inputs.v, inputs.dout)
    torch.testing.assert_close(k.grad.double(), shared.dk.sum(0, keepdim=True), atol=8e-3, rtol=8e-3)
    qkv = torch.stack((inputs.q, inputs.k, inputs.v), 2).requires_grad_()
    attend(*qkv.unbind(2)).backward(inputs.dout)
    for i, right_grad in enumerate(inputs.expected().values()):
        torch.testing.assert_close(qkv.grad[:, :, i].double(), right_grad, atol=8e-3, rtol=8e-3)


def test_c44_types_and_layouts_of_gradients(device: str) -> None:
    inputs = Inputs(device, sinks=True, sinks_in_16_bit=True)
    inputs.q = inputs.q.transpose(1, 2).contiguous().transpose(1, 2)
    for x, grad in zip(inputs.leaves(), inputs.gradients().values(), strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (x.shape, x.dtype, x.device)
    assert inputs.gradients()["dq"].stride() == inputs.q.stride()  # whoever made q gets it as it is


# ---------------------------------------------------------------------- C45: repeatable
@pytest.mark.parametrize("switch", ["keyword", "PyTorch's"])
@pytest.mark.parametrize("case", ["causal", "grouped heads", "everything"])
def test_c45_equal_calls_give_equal_bits(device: str, case: str, switch: str) -> None:
    inputs = Inputs(device, **{**CASES[case], "seq_len_q": 700, "seq_len_k": 700})
    more = {"deterministic": True} if switch == "keyword" else {}
    torch.use_deterministic_algorithms(switch != "keyword")
    try:
        expected = inputs.gradients(inputs.dlse, **more)
        for _ in range(3 if device == "cpu" else 50):
            equal(inputs.gradients(inputs.dlse, **more), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_c45_deterministic_is_a_flag(device: str) -> None:
    inputs = Inputs(device, seq_len_q=8, seq_len_k=8)
    for leaves in (inputs.leaves(), [x.detach() for x in inputs.leaves()]):
        with pytest.raises(TypeError, match="deterministic is 'yes'; it must be True or False"):
            inputs.results(leaves, deterministic="yes")


def test_c45_a_batch_item_does_not_depend_on_its_neighbours(device: str) -> None:
    inputs = Inputs(device, batch=3, causal=True)
    expected = inputs.gradients(deterministic=True)
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[0], x[2] = 7.0, math.nan
    found = inputs.gradients(deterministic=True)
    for name, grad in found.items():
        assert torch.equal(grad[1], expected[name][1])


# ---------------------------------------------------------------------- C46: what is kept
@pytest.mark.parametrize("which", ["q", "k", "v", "sinks", "out"])
def test_c46_a_tensor_that_changes_in_between_is_an_error(device: str, which: str) -> None:
    inputs = Inputs(device, sinks=True)
    leaves = [2 * x for x in inputs.leaves()]
    out = inputs.results(leaves)
    loss = out.float().sum()
    {**dict(zip(("q", "k", "v", "sinks"), leaves, strict=True)), "out": out}[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_c46_offsets_that_change_in_between_are_an_error(device: str) -> None:
    (*inputs, dout), offsets, longest = packed(device, spare=0)
    out = attention_varlen(*(x.requires_grad_() for x in inputs), *offsets, *longest)
    offsets[0].add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


def test_c46_a_graph_runs_once_unless_it_is_retained(device: str) -> None:
    inputs = Inputs(device)
    leaves = inputs.leaves()
    out = inputs.results(leaves)
    first = torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)
    again = torch.autograd.grad(out, leaves, inputs.dout)
    if device == "cpu":
        assert all(map(torch.equal, first, again))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, inputs.dout)


def test_c46_only_inputs_output_and_lse_are_kept(device: str) -> None:
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    inputs = Inputs(device, n_heads=4)
    leaves = inputs.leaves()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = inputs.results(leaves)
    places = {x.data_ptr() for x in (*leaves, out)}
    (lse,) = (x for x in kept if x.data_ptr() not in places)
    assert (lse.shape, lse.dtype) == ((2, 4, 130), torch.float32)
    assert len(kept) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("n_heads_kv", [8, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_c46_memory(deterministic: bool, n_heads_kv: int, causal: bool) -> None:
    """Beyond gradients a float32 dQ and 8 bytes a row and head, and nothing stays."""
    batch, seq_len, n_heads, d = 2, 2048, 8, 128
    inputs = Inputs("cuda", BFLOAT, batch, seq_len, seq_len, n_heads, n_heads_kv, d, causal=causal)
    for _ in range(2):  # the first call builds and loads
        leaves = inputs.leaves()
        out = inputs.results(leaves, deterministic=deterministic)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, leaves, inputs.dout)
        torch.cuda.synchronize()
        peak, after = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
        made = sum(grad.numel() * grad.element_size() for grad in grads)
        del out
    rows = batch * seq_len * n_heads
    assert peak <= made + rows * (4 * d + 8) + 4096
    assert after <= made + 4096


# ---------------------------------------------------------------------- C62: functions of the user's
def scored(table: Tensor, slopes: Tensor) -> Any:
    return lambda s, b, h, q, k: s * (1.0 + 0.1 * torch.sin(s)) + table[h, q - k + 90] + slopes[h] * (k % 5)


def seen(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q + 30 >= k) & ((q + k + h) % 3 != 0)


def test_c62_gradients_through_functions_and_of_what_they_capture(device: str) -> None:
    inputs = Inputs(device, n_heads=4, seq_len_q=70, seq_len_k=90)
    generator = torch.Generator().manual_seed(5)
    tables = [torch.randn(*s, generator=generator).to(device).requires_grad_() for s in ((4, 160), (4,))]
    own = (*inputs.leaves(), *tables)

    def gradients() -> tuple[Tensor, ...]:
        results = attend(*own[:3], score_mod=scored(*tables), mask_mod=seen, return_lse=True)
        return torch.autograd.grad(results, own, (inputs.dout, inputs.dlse))

    found = gradients()
    assert all(map(torch.equal, gradients()[3:], found[3:]))
    wide = [x.detach().double().requires_grad_() for x in own]
    out, lse = reference(*wide[:3], score_mod=scored(*wide[3:]), mask_mod=seen)
    expected = torch.autograd.grad((out, lse), wide, (inputs.dout.double(), inputs.dlse.double()))
    for x, grad, exact in zip(own, found, expected, strict=True):
        assert (grad.dtype, grad.shape, grad.device) == (x.dtype, x.shape, x.device)
        assert (grad.double() - exact).abs().max() <= 2e-2 * exact.abs().max()


def test_c62_what_is_hidden_adds_exactly_0(device: str) -> None:
    inputs = Inputs(device, seq_len_q=20, seq_len_k=20)
    table = torch.arange(20.0, device=device).requires_grad_()  # whose first root has no finite slope

    def roots(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return torch.where(k > 0, s + torch.sqrt(table[k]), -math.inf)

    own = (*inputs.leaves(), table)
    out = attend(*own[:3], score_mod=roots, mask_mod=lambda b, h, q, k: (k != 7) & (q != 3))
    dq, dk, dv, dtable = torch.autograd.grad(out, own, inputs.dout)
    assert all(x.isfinite().all() and x.any() for x in (dq, dk, dv, dtable))
    assert not dq[:, 3].any()
    assert not any(x[:, [0, 7]].any() for x in (dk, dv))
    assert not dtable[[0, 7]].any()


def test_c62_a_captured_tensor_that_changes_in_between_is_an_error(device: str) -> None:
    inputs = Inputs(device, seq_len_q=20, seq_len_k=20)
    table = torch.zeros(20, device=device)
    out = attend(*inputs.leaves(), score_mod=lambda s, b, h, q, k: s + table[k])
    table.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(inputs.dout)
