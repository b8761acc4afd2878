"""Calls that need no kernel: what runs, what ``explain_choice``, ``prepare`` and ``explain`` say of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from flash_attention import attention, attention_varlen, explain_choice, prepare
from flash_attention.backends import cpu, cpu_gradients
from flash_attention.cached import attention_cached
from flash_attention.errors import InfeasibleConfigError
from flash_attention.run import choices, cuda_choice, passes
from flash_helpers import build
from flash_helpers.cli import app
from flash_helpers.kernel_configs import DType, device_facts, get_kernels_to_build
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.select.no_kernel import no_kernel

NARROW = next(c for c in get_kernels_to_build() if (c.dtype, c.d_head) == (DType.FP16, 64))
HIDDEN = "mask hides every key from every query"

# Sizes (batch, queries, keys, heads), options, and what there is none of; None: a kernel runs.
CALLS: list[tuple[tuple[int, int, int, int], dict[str, Any], str | None]] = [
    ((0, 4, 6, 2), {}, "no batch items"),
    ((2, 0, 6, 2), {}, "no queries"),
    ((2, 4, 6, 0), {}, "no query heads"),
    ((2, 4, 0, 2), {}, "no keys"),
    ((2, 0, 0, 2), {"causal": True}, "no queries"),
    ((2, 4, 6, 2), {"window": (-5, 3)}, HIDDEN),
    ((2, 4, 6, 2), {"window": (None, -6)}, HIDDEN),
    ((2, 4, 6, 2), {"window": (None, -5)}, None),  # the last query sees the first key
    ((2, 4, 6, 2), {"window": (-4, None)}, HIDDEN),
    ((2, 4, 6, 2), {"window": (-3, None)}, None),  # the first query sees the last key
    ((2, 4, 6, 2), {"causal": True, "diagonal_offset": -6}, HIDDEN),
    ((2, 6, 4, 2), {"causal": True}, None),  # the first two queries alone see nothing
    ((2, 1, 6, 2), {"causal": True}, None),
    ((2, 4, 6, 2), {"mask_mod": lambda b, h, q, k: k < q - 100}, HIDDEN),  # a band, and no function
    ((2, 4, 6, 2), {"mask_mod": lambda b, h, q, k: (q + k) < 0}, None),  # what it hides a kernel finds
    ((2, 4, 6, 2), {}, None),
]


def tensors(sizes: tuple[int, int, int, int], d: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    batch, queries, keys, heads = sizes
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(batch, n, heads, d, generator=generator).half() for n in (queries, keys, keys))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions of the kernels that have run."""
    names: list[str] = []

    def noted(direction: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (names.append(direction), run(*given))[1]

    monkeypatch.setattr(cpu, "run", noted("forward", cpu.run))
    monkeypatch.setattr(cpu_gradients, "run_backward", noted("backward", cpu_gradients.run_backward))
    return names


# ---------------------------------------------------------------------- what runs, and what is said
@pytest.mark.parametrize(("sizes", "options", "missing"), CALLS)
def test_what_is_said_is_what_runs(ran: list[str], sizes: Any, options: Any, missing: str | None) -> None:
    q, k, v = tensors(sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(q, k, v, **options, return_lse=True)
    gradients = torch.autograd.grad(out.float().sum() + lse.clamp(min=-9).sum(), leaves)
    choice = explain_choice(q, k, v, **options, return_lse=True)
    asked = [choice, choice.gradients, explain_choice(q, k, v, **options, direction="backward")]
    if missing is None:
        assert ran == ["forward", "backward"]
        assert all(each.kernel is not None for each in asked)
        return
    assert ran == []
    for each in asked:
        assert (each.kernel, each.rejected) == (None, ())
        assert each.reason.startswith("the call needs no kernel: it")
        assert missing in each.reason
    assert not out.any()
    assert (lse == -math.inf).all()
    assert not any(gradient.any() for gradient in gradients)
    assert (
        str(choice)
        == f"no kernel\n  because {choice.reason}\ngradients by no kernel\n  because {choice.reason}"
    )


@pytest.mark.parametrize(("sizes", "options", "missing"), CALLS)
@pytest.mark.parametrize("device", ["H100", "A100"])
def test_a_gpu_that_is_not_there(device: str, sizes: Any, options: Any, missing: str | None) -> None:
    q, k, v = (x.to("meta") for x in tensors(sizes))
    for direction in ("forward", "backward"):
        choice = explain_choice(q, k, v, **options, facts=device_facts(device), direction=direction)
        assert (choice.kernel is None) == (missing is not None)
        assert (missing or "") in choice.reason


@pytest.mark.parametrize(("n_queries", "n_keys", "window", "runs"), [
    (3, 8, (None, None), True),  # of which no item counts one: the device alone knows
    (0, 8, (None, None), False),
    (3, 0, (None, None), False),
    (3, 8, (-5, 3), False),
    (3, 8, (None, -8), False),
    (3, 8, (None, -7), True),
    (3, 8, (-3, None), False),
    (3, 8, (-2, None), True),
])  # fmt: skip
def test_caches(ran: list[str], n_queries: int, n_keys: int, window: Any, runs: bool) -> None:
    q, k, v = tensors((2, n_queries, n_keys, 2))[0], *tensors((2, 1, n_keys, 2))[1:]
    sinks, counts = torch.tensor([0.5, -1.0]), torch.zeros(2, dtype=torch.int32)
    options = {"window": window, "sinks": sinks, "return_lse": True}
    out, lse = attention_cached(q, k, v, seqused_k=counts, **options)
    choice = explain_choice(q, k, v, seqused_k=counts, **options)
    assert (ran == ["forward"]) == (choice.kernel is not None) == runs
    assert not out.any()
    assert torch.equal(lse, sinks[None, :, None].expand_as(lse))


@pytest.mark.parametrize("window", [(None, None), (-5, 3)])
def test_packed_rows_take_a_kernel_which_reads_their_offsets(ran: list[str], window: Any) -> None:
    q, k, v = (x.flatten(0, 1) for x in tensors((1, 5, 5, 2)))
    ends = torch.tensor([0, 3, 3], dtype=torch.int32)  # two rows of no sequence
    given = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=3, max_seqlen_k=3)
    assert explain_choice(q, k, v, **given, window=window).kernel is not None
    attention_varlen(q, k, v, *given.values(), window=window)
    assert ran == ["forward"]
    for none in ({"max_seqlen_q": 0}, {"cu_seqlens_q": ends[:1], "cu_seqlens_k": ends[:1]}):
        empty = (
            given | {"cu_seqlens_q": torch.zeros_like(ends), "cu_seqlens_k": torch.zeros_like(ends)} | none
        )
        assert explain_choice(q, k, v, **empty).kernel is None
        attention_varlen(q, k, v, *empty.values())
    assert ran == ["forward"]


def test_packed_queries_over_a_cache(ran: list[str]) -> None:
    q, (_, k, v) = tensors((1, 5, 1, 2))[0][0], tensors((2, 1, 8, 2))
    ends, sinks = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0.5, -1.0])
    given = dict(cu_seqlens_q=ends, cu_seqlens_k=None, max_seqlen_q=3, max_seqlen_k=8)
    given |= dict(seqused_k=torch.tensor([8, 2], dtype=torch.int32), window=(-5, 3), sinks=sinks)
    out, lse = attention_varlen(q, k, v, **given, return_lse=True)
    assert explain_choice(q, k, v, **given, return_lse=True).kernel is None
    assert ran == []
    assert not out.any()
    assert torch.equal(lse[:, :4], sinks[:, None].expand(2, 4))
    assert (lse[:, 4] == -math.inf).all()  # a row of no sequence


@pytest.mark.parametrize("window", [(-5, 3), (None, None)])
def test_gradients_of_sinks_that_take_everything(ran: list[str], window: Any) -> None:
    """Where no key is seen, the LSE is the sink."""
    q, k, v = tensors((2, 4, 6 if window[0] else 0, 2))
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    _, lse = attention(q, k, v, window=window, sinks=sinks, return_lse=True)
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(2))
    (dsinks,) = torch.autograd.grad(lse, [sinks], dlse)
    assert ran == []
    torch.testing.assert_close(dsinks, dlse.sum((0, 2)))


# ---------------------------------------------------------------------- what is refused all the same
def test_documents_are_not_looked_for_where_nothing_is_seen(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As packed sequences they would take a kernel, which reads offsets."""
    looked: list[str] = []
    monkeypatch.setattr(passes, "as_packed", lambda *given, **options: looked.append("forward"))
    monkeypatch.setattr(choices, "packed_form", lambda *given, **options: looked.append("explained"))
    documents = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2])
    q, k, v = tensors((1, 8, 8, 2))
    options = {"mask_mod": lambda b, h, q, k: documents[q] == documents[k]}
    hidden = attention(q, k, v, window=(None, -8), **options)
    assert explain_choice(q, k, v, window=(None, -8), **options).kernel is None
    assert (ran, looked) == ([], [])
    assert not hidden.any()
    attention(q, k, v, window=(None, -7), **options)
    assert explain_choice(q, k, v, window=(None, -7), **options).kernel is not None
    assert (ran, looked) == (["forward"], ["forward", "explained"])


@pytest.mark.parametrize(("sizes", "options", "missing"), [call for call in CALLS if call[2]])
def test_a_configuration_that_cannot_be_kept_is_refused(sizes: Any, options: Any, missing: str) -> None:
    wide = tensors(sizes, d=128)
    for call in (attention, explain_choice):
        with pytest.raises(InfeasibleConfigError, match="its head size is 64, the tensors' is 128"):
            call(*wide, config=NARROW, **options)
    fitting = tensors(sizes)
    assert not attention(*fitting, config=NARROW, **options).any()
    assert missing in explain_choice(*fitting, config=NARROW, **options).reason


def test_a_feature_that_no_kernel_has_is_no_obstacle() -> None:
    q, k, v = (x.to("meta") for x in tensors((2, 0, 6, 2)))
    assert explain_choice(q, k, v, n_sms=7, facts=device_facts("A100")).kernel is None


# ---------------------------------------------------------------------- building ahead
def test_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that is acted: what is built, or chosen, fails."""
    acted = type("Acted", (), {"device_facts_of": lambda self, device: device_facts("H100")})()
    monkeypatch.setattr(choices, "backend", lambda name: acted)
    monkeypatch.setattr(cuda_choice, "backend", lambda name: pytest.fail("a kernel is chosen"))
    monkeypatch.setattr(build, "build_kernels", lambda *given: pytest.fail("a kernel is built"))
    hidden = AttentionProblem(DType.FP16, 2, 100, 90, 4, 2, 64, 64, right=-90)
    for device in ("cpu", "cuda:0"):
        assert prepare([hidden, hidden.backward()], device) == [no_kernel(hidden)] * 2


# ---------------------------------------------------------------------- the command line
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_command_says_so(tmp_path: Path, direction: str) -> None:
    path = tmp_path / "explained.json"
    options = ["--seq-len", "96", "--direction", direction, "--json", str(path)]
    done = CliRunner().invoke(app, ["explain", *options, "--window=all,-96"])
    assert done.exit_code == 0, done.output
    assert f"the call needs no kernel: its {HIDDEN}" in " ".join(done.output.split())
    assert "measured on this card" not in done.output
    (written,) = json.loads(path.read_text())
    assert (written["chosen"], written["candidates"], written["unable"]) == (None, [], {})
    assert HIDDEN in written["reason"]
    done = CliRunner().invoke(app, ["explain", *options, "--window=all,-95"])
    assert json.loads(path.read_text())[0]["chosen"] is not None
    assert "needs no kernel" not in done.output


def test_the_command_says_so_of_a_kernel_that_is_named() -> None:
    for window, said in (("all,-96", True), ("all,-95", False)):
        done = CliRunner().invoke(
            app, ["explain", NARROW.short_form(), "--seq-len", "96", f"--window={window}"]
        )
        assert done.exit_code == 0, done.output
        assert ("attention runs neither this one nor another" in " ".join(done.output.split())) == said
