"""``backward`` and ``backward_timed`` on the CPU, and the choice of what computes gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attention
from flash_attention import attention, backward, backward_timed, explain_choice
from flash_attention.backends import cuda, cuda_kernels
from flash_attention.errors import InfeasibleConfigError
from flash_attention.run import choices
from flash_helpers.benchmark.expected import gradients
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig, device_facts
from flash_helpers.kernels.families import direction_of, directions, kernel_of
from flash_helpers.kernels.problem import BACKWARD, FORWARD, AttentionProblem
from flash_helpers.problem import Problem
from flash_helpers.results.bucket import Bucket
from flash_helpers.select.candidates import unable_reason
from flash_helpers.select.choice import attention_problem
from flash_helpers.select.select import select
from flash_helpers.test.gradients import NAMES, check_gradients
from flash_helpers.test.reference import reference_gradients

CONFIGS = (kernel.config for kernel in directions(BACKWARD)[0].built())
CONFIG = next(c for c in CONFIGS if (c.dtype, c.d_head, c.d_head_v) == (DType.BF16, 64, 64))
FORWARD_CONFIG = FlashForwardKernelConfig(DType.BF16, 64, 64, 64, 4, True, True, True, 0, 2, 2, True, True)
PROBLEM = AttentionProblem(DType.BF16, 2, 512, 512, 4, 2, 64, 64, right=0)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Inputs:
    """Tensors of a call, and what its forward pass returns."""

    def __init__(self, d: int = 64, **options: Any) -> None:
        self.q, self.k, self.v = randn(2, 30, 4, d), randn(2, 50, 2, d, seed=1), randn(2, 50, 2, 64, seed=2)
        self.dout, self.options = randn(2, 30, 4, 64, seed=3), options
        self.o, self.lse = attention(self.q, self.k, self.v, return_lse=True, **options)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        names = ("dout", "q", "k", "v", "o", "lse")
        return {name: getattr(self, name) for name in names} | self.options | changes

    def check(self, found: tuple[Tensor, ...], dlse: Tensor | None = None) -> None:
        named = dict(zip(NAMES, found, strict=False))
        check_gradients(named, self.q, self.k, self.v, self.dout, dlse, out=self.o, **self.options)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 4), "softcap": 3.0}], ids=str)
def test_gradients_by_a_named_kernel(options: dict[str, Any]) -> None:
    inputs = Inputs(**options)
    inputs.check(backward(CONFIG, **inputs.arguments()))
    dlse = torch.randn(2, 4, 30)
    inputs.check(backward(CONFIG, **inputs.arguments(dlse=dlse)), dlse)
    found, milliseconds = backward_timed(CONFIG, **inputs.arguments())
    inputs.check(found)
    assert milliseconds > 0


def test_outputs_that_are_given_are_written() -> None:
    inputs = Inputs(causal=True)
    given = {"dq": randn(4, 2, 30, 64).permute(1, 2, 0, 3), "dv": torch.empty_like(inputs.v)}
    dq, dk, dv = backward(CONFIG, **inputs.arguments(**given))
    assert dq is given["dq"]
    assert dv is given["dv"]
    inputs.check((dq, dk, dv))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dout": randn(2, 30, 4, 32)}, ValueError, r"dout has shape \(2, 30, 4, 32\); .* \(2, 30, 4, 64\)"),
        ({"o": randn(2, 30, 4, 64).half()}, TypeError, "o is torch.float16; it must be torch.bfloat16"),
        ({"lse": torch.zeros(2, 30, 4)}, ValueError, r"lse has shape .* it is \(2, 4, 30\), \(batch, heads"),
        ({"lse": torch.zeros(2, 4, 30).double()}, TypeError, "lse is torch.float64; it must be"),
        ({"dlse": torch.zeros(2, 4)}, ValueError, r"dlse has shape \(2, 4\)"),
        ({"lse": None}, TypeError, "lse is None; it must be a torch.Tensor"),
        ({"dout": None}, TypeError, "dout is None; it must be a torch.Tensor"),
        ({"o": None}, TypeError, "o is None; it must be a torch.Tensor"),
        ({"dq": randn(2, 30, 4, 32)}, ValueError, "dq has shape"),
        ({"dk": torch.empty(2, 50, 2, 64)}, TypeError, "dk is torch.float32; the result is torch.bfloat16"),
        ({"dv": randn(1, 50, 2, 64).expand(2, -1, -1, -1)}, ValueError, "elements of dv share memory"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"causal": 2}, TypeError, "causal"),
        ({"q": randn(2, 30, 4, 64).requires_grad_()}, NotImplementedError, "q requires grad, and"),
        ({"v": randn(2, 50, 3, 64)}, ValueError, "k and v must agree"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        backward(CONFIG, **Inputs().arguments(**changes))


def test_outputs_that_overlap_are_refused() -> None:
    inputs = Inputs()
    with pytest.raises(ValueError, match="dq overlaps dout in memory"):
        backward(CONFIG, **inputs.arguments(dq=inputs.dout))
    both = torch.empty_like(inputs.k)
    with pytest.raises(ValueError, match="dk overlaps dv in memory"):
        backward(CONFIG, **inputs.arguments(dk=both, dv=both))


def test_a_configuration_of_another_direction_is_refused() -> None:
    inputs = Inputs()
    with pytest.raises(TypeError, match="it must be a FlashBackwardKernelConfig or a HopperBackwardKernel"):
        backward(FORWARD_CONFIG, **inputs.arguments())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="it must be a FlashForwardKernelConfig or a HopperForwardKernel"):
        attention(inputs.q, inputs.k, inputs.v, config=CONFIG)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no argument soft_cap: its name here is softcap"):
        backward(CONFIG, **inputs.arguments(soft_cap=1.0))
    with pytest.raises(InfeasibleConfigError, match="cannot compute backward bf16"):
        backward(CONFIG, **Inputs(d=128).arguments())


# ---------------------------------------------------------------------- the choice
def test_a_problem_asks_for_kernels_of_its_direction() -> None:
    problem, facts = PROBLEM.backward(), device_facts("H200")
    choice = select(problem, facts)
    assert direction_of(choice.kernel).name == BACKWARD
    assert choice.kernel.traits.causal
    assert all(direction_of(other.kernel).name == BACKWARD for other in choice.rejected)
    assert "it computes forward, and backward is wanted" in str(
        unable_reason(FORWARD_CONFIG, problem, [FORWARD_CONFIG])
    )
    assert direction_of(select(PROBLEM, facts).kernel).name == FORWARD


def test_deterministic_kernels_alone_are_taken_where_equal_bits_are_wanted(monkeypatch) -> None:
    assert select(PROBLEM.backward(deterministic=True), device_facts("H200")).kernel.config.deterministic
    problem = PROBLEM.backward(deterministic=True)
    monkeypatch.setattr(type(CONFIG), "deterministic", False)
    assert "equal bits in every run are wanted" in str(unable_reason(CONFIG, problem, [CONFIG]))
    assert unable_reason(CONFIG, PROBLEM.backward(), [CONFIG]) is None


def test_explain_choice_says_what_computes_gradients() -> None:
    q = torch.empty(2, 512, 4, 64, dtype=torch.bfloat16, device="meta")
    facts = device_facts("A100")
    choice = explain_choice(q, q, q, causal=True, facts=facts, direction=BACKWARD, deterministic=True)
    assert direction_of(choice.kernel).name == BACKWARD
    for wrong, message in (
        ({"direction": "sideways"}, "direction is 'sideways'; it must be 'forward' or 'backward'"),
        ({"deterministic": True}, "the forward pass always is"),
        ({"direction": BACKWARD, "config": FORWARD_CONFIG}, "config names a kernel of the forward pass"),
    ):
        with pytest.raises(ValueError, match=message):
            explain_choice(q, q, q, facts=facts, **wrong)


def test_explain_choice_shows_both_kernels_of_a_call_with_gradients() -> None:
    q = torch.empty(2, 512, 4, 64, dtype=torch.bfloat16, device="meta")
    facts = device_facts("A100")
    assert explain_choice(q, q, q, facts=facts).gradients is None
    choice = explain_choice(q, q, q, causal=True, facts=facts, backward_config=CONFIG)
    assert direction_of(choice.kernel).name == FORWARD
    assert choice.gradients.kernel == kernel_of(CONFIG, causal=True)
    assert choice.gradients.reason == "the caller insists on it"
    assert "\ngradients by (BF16, 64, " in str(choice)
    leaf = torch.empty_like(q).requires_grad_()
    choice = explain_choice(leaf, q, q, causal=True, facts=facts, deterministic=True)
    alone = explain_choice(q, q, q, causal=True, facts=facts, direction=BACKWARD, deterministic=True)
    assert choice.gradients == alone
    with torch.no_grad():
        assert explain_choice(leaf, q, q, facts=facts).gradients is None
    assert explain_choice(leaf, q, q, facts=device_facts("H100"), n_sms=50).gradients is None
    with pytest.raises(ValueError, match="kernels of gradients keep to no limit of SMs"):
        explain_choice(q, q, q, facts=facts, n_sms=50, backward_config=CONFIG)
    one = explain_choice(q, q, q, facts=facts, direction=BACKWARD, backward_config=CONFIG)
    assert one.kernel == kernel_of(CONFIG)


def test_explain_choice_of_meta_tensors_asks_for_a_gpu() -> None:
    q = torch.empty(2, 512, 4, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match=r"q is a meta tensor.*pass facts=.*device_facts\('H100'\)"):
        explain_choice(q, q, q)


def test_a_kernel_in_place_of_its_configuration() -> None:
    inputs, message = Inputs(), "BackwardKernel.*pass the configuration alone, kernel.config"
    with pytest.raises(TypeError, match=f"kernel_cfg is a {message}"):
        backward(kernel_of(CONFIG), **inputs.arguments())
    with pytest.raises(TypeError, match=f"backward_config is a {message}"):
        attention(inputs.q, inputs.k, inputs.v, backward_config=kernel_of(CONFIG))


@pytest.mark.parametrize("offset", [-7, 3])
def test_backward_takes_a_diagonal_offset(offset: int) -> None:
    inputs = Inputs(causal=True, diagonal_offset=offset)
    inputs.check(backward(CONFIG, **inputs.arguments()))
    found, _ = backward_timed(CONFIG, **inputs.arguments())
    inputs.check(found)


# ---------------------------------------------------------------------- backward_config of attention
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_runs_the_backward_kernel_that_is_named(compiled: bool, monkeypatch) -> None:
    from flash_attention.backends import cpu_gradients

    ran, run = [], cpu_gradients.run_backward
    monkeypatch.setattr(
        cpu_gradients, "run_backward", lambda call, choice: ran.append(choice.kernel) or run(call, choice)
    )
    torch._dynamo.reset()
    call = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
    inputs = Inputs(causal=True)
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out = call(*leaves, causal=True, backward_config=CONFIG)
    found = torch.autograd.grad(out, leaves, inputs.dout)
    assert [kernel.config for kernel in ran] == [CONFIG]
    inputs.check(found)


def test_a_backward_kernel_that_cannot_be_kept_is_refused_before_anything_runs() -> None:
    inputs = Inputs(d=128)
    leaf = inputs.q.requires_grad_()
    with pytest.raises(InfeasibleConfigError, match=r"backward_config .* its head size is 64"):
        attention(leaf, inputs.k, inputs.v, backward_config=CONFIG)
    with torch.no_grad():
        attention(leaf, inputs.k, inputs.v, backward_config=CONFIG)  # no gradient, no kernel
    for wrong, message in (
        (FORWARD_CONFIG, "backward_config is a FlashForwardKernelConfig; it must be a FlashBackwardKernelC"),
        ("(BF16, 64)", "backward_config is a str"),
        (dataclasses.replace(CONFIG, dtype=DType.FP16), "backward_config computes in FP16, q is torch.bfloa"),
    ):
        with torch.no_grad(), pytest.raises(TypeError, match=message):
            attention(inputs.q, inputs.k, inputs.v, backward_config=wrong)


def test_a_backward_kernel_is_refused_where_its_call_sees_nothing() -> None:
    """The forward pass needs no kernel there: it was refused in the backward pass alone."""
    inputs = Inputs(d=128)
    leaf = inputs.q.requires_grad_()
    for seen in ({"window": (-5, 3)}, {"k": inputs.k[:, :0], "v": inputs.v[:, :0]}):
        with pytest.raises(InfeasibleConfigError, match=r"backward_config .* its head size is 64"):
            attention(**{"q": leaf, "k": inputs.k, "v": inputs.v, "backward_config": CONFIG, **seen})


def test_a_backward_kernel_is_refused_that_needs_more_memory_for_the_options_of_a_call() -> None:
    """A soft cap takes one tile more of a pair's shared memory in FP16."""
    config = next(
        k.config
        for k in directions(BACKWARD)[0].built()
        if (k.config.dtype, k.config.d_head, k.config.paired_warps) == (DType.FP16, 256, True)
    )
    facts = dataclasses.replace(device_facts("A100"), smem_per_block=config.smem_bytes())
    q = torch.empty(1, 64, 2, 256, dtype=torch.float16, device="meta")
    named = dict(facts=facts, direction=BACKWARD, backward_config=config)
    assert explain_choice(q, q, q, **named).kernel == kernel_of(config)
    with pytest.raises(InfeasibleConfigError, match=r"^backward_config .* bytes of shared memory"):
        explain_choice(q, q, q, softcap=2.0, **named)


def test_equal_bits_refuse_a_named_kernel_that_does_not_repeat() -> None:
    ordered = select(PROBLEM.backward(deterministic=True), device_facts("A100")).kernel.config
    built = (kernel.config for kernel in directions(BACKWARD)[0].built())
    loose = next(c for c in built if not c.deterministic and (c.dtype, c.d_head) == (DType.BF16, 64))
    q = torch.empty(2, 512, 4, 64, dtype=torch.bfloat16, device="meta")
    facts = device_facts("A100")
    for config, deterministic in ((ordered, True), (ordered, False), (loose, False)):
        explain_choice(q, q, q, facts=facts, backward_config=config, deterministic=deterministic)
    with pytest.raises(InfeasibleConfigError, match=r"backward_config .* equal bits in every run are wanted"):
        explain_choice(q, q, q, facts=facts, backward_config=loose, deterministic=True)


def test_problems_of_gradients_are_checked() -> None:
    (choice,) = flash_attention.prepare([PROBLEM.backward()], "cpu")
    assert choice.kernel.traits.causal
    for wrong, message in (
        (dataclasses.replace(PROBLEM, direction="sideways"), "direction is 'sideways'"),
        (dataclasses.replace(PROBLEM, varlen=True, cached=True, paged=True).backward(), "have no gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attention.prepare([wrong], "cpu")


def test_both_kernels_of_a_call_are_compiled_at_once(monkeypatch) -> None:
    facts, built = device_facts("A100"), []
    monkeypatch.setattr(cuda, "device_facts_of", lambda device: facts)
    monkeypatch.setattr(cuda_kernels, "device_facts_of", lambda device: facts)
    for module in (cuda, cuda_kernels):
        monkeypatch.setattr(module, "load_kernel", lambda kernel, target: kernel if kernel in built else None)
        monkeypatch.setattr(module, "build_obstacle", lambda: None)
    monkeypatch.setattr(cuda_kernels.build, "build_kernels", lambda kernels, targets: built.extend(kernels))
    monkeypatch.setattr(choices, "_choices", {})
    forward, gradients_of_it = choices.choose_with_gradients(PROBLEM, torch.device("cuda", 0))
    assert {forward.kernel, gradients_of_it.kernel} == set(built)
    assert [direction_of(c.kernel).name for c in (forward, gradients_of_it)] == [FORWARD, BACKWARD]
    built.clear()  # remembered: nothing is looked for again
    assert choices.choose_with_gradients(PROBLEM, torch.device("cuda", 0)) == (forward, gradients_of_it)
    assert not built


# ---------------------------------------------------------------------- what is measured
def test_problems_of_the_command_line_have_a_direction() -> None:
    problem = Problem(DType.BF16, 2, 4, 512, 64, causal=True)
    gradient = dataclasses.replace(problem, direction=BACKWARD)
    assert gradient.flop() == problem.flop() * 5 // 2
    assert gradient.label() == f"backward {problem.label()}"
    assert attention_problem(gradient) == attention_problem(problem).backward()
    assert gradient.fits(CONFIG)
    assert not problem.fits(CONFIG)
    assert not gradient.fits(FORWARD_CONFIG)
    assert Bucket.of_problem(gradient, 132).direction == BACKWARD
    assert Problem.from_json(gradient.to_json()) == gradient
    assert "direction" not in problem.to_json()
    with pytest.raises(ValueError, match="direction is 'sideways'"):
        dataclasses.replace(problem, direction="sideways")


@pytest.mark.parametrize("sizes", [(40, 70), (70, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_what_benchmarks_compare_gradients_with(sizes: tuple[int, int], causal: bool, monkeypatch) -> None:
    monkeypatch.setattr("flash_helpers.benchmark.expected.REFERENCE_BYTES", 1 << 16)  # several slices
    q, k, v = randn(2, sizes[0], 4, 16), randn(2, sizes[1], 2, 16, seed=1), randn(2, sizes[1], 2, 16, seed=2)
    dout = randn(2, sizes[0], 4, 16, seed=3)
    right = reference_gradients(q, k, v, dout, causal=causal)
    for found, expected in zip(gradients(q, k, v, dout, causal), right, strict=False):
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
