"""Adapters of other libraries, against functions with the parameters and results of the packages' own."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_helpers.benchmark.correctness import output_error, reference
from flash_helpers.benchmark.peers import DEFAULT_PEERS, PEERS, select_peers
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
PROBLEM = Problem(DType.BF16, 1, 2, 48, 64, causal=True)

# fa3-fwd 0.0.3 returns O alone, flash-attn-4 4.0.0 (O, LSE), with None for an LSE not asked for. Scale and
# mask stand at different places, so that they must be given by name.
FA3 = """
def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False):
    return compute(q, k, v, causal)
"""
FA4 = """
def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
                    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, return_lse=False):
    return compute(q, k, v, causal), None
"""
COMPUTE = """
from torch.nn.functional import scaled_dot_product_attention
def compute(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that can be imported for one test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [n for n in sys.modules if n.split(".")[0] in ("fa3_fwd_interface", "flash_attn")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_packages_are_called_as_they_are_written(
    name: str, packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "fa3":
        (packages / "fa3_fwd_interface.py").write_text(COMPUTE + FA3)
    else:
        (packages / "flash_attn" / "cute").mkdir(parents=True)
        (packages / "flash_attn" / "cute" / "__init__.py").write_text(COMPUTE + FA4)
    peer = PEERS[name]
    assert peer.unavailable_reason(PROBLEM, CUDA) is None
    q, k, v = PROBLEM.inputs(CPU)
    o = peer.prepare(PROBLEM, q, k, v).call()
    assert output_error(o, reference(q, k, v, causal=True)).wrong_reason(DType.BF16) is None
    for module in ("fa3_fwd_interface", "flash_attn", "flash_attn.cute"):
        sys.modules.pop(module, None)


def test_who_is_absent_says_why(packages: Path) -> None:
    def missing(name: str, problem: Problem = PROBLEM, device: torch.device = CUDA) -> str:
        return PEERS[name].unavailable_reason(problem, device) or ""

    assert missing("fa3") == "not installed (pip install fa3-fwd)"
    assert missing("fa4") == "not installed (pip install flash-attn-4)"
    (packages / "flash_attn").mkdir()
    (packages / "flash_attn" / "__init__.py").write_text("raise OSError('libcudart.so.12 is not here')")
    assert missing("fa4") == "not installed (pip install flash-attn-4)"
    (packages / "fa3_fwd_interface.py").write_text("")
    assert missing("fa3") == ""
    half = Problem(DType.FP16, 1, 2, 48, 64)
    assert missing("fa3", half) == "takes BF16 only"
    for name in PEERS:
        if name not in ("math", "sdpa-cpu", "sdpa"):
            assert missing(name, device=CPU) == "runs on cuda only"
    assert "top-left" in missing("cudnn", Problem(DType.FP16, 1, 2, 48, 64, causal=True, seq_len_k=96))


def test_the_cpus_own_attention_is_a_peer() -> None:
    q, k, v = PROBLEM.inputs(CPU)
    peer = PEERS["sdpa-cpu"]
    assert peer.unavailable_reason(PROBLEM, CPU) is None
    prepared = peer.prepare(PROBLEM, q, k, v)
    with prepared.context():
        o = prepared.call()
    expected = scaled_dot_product_attention(*(x.transpose(1, 2).float() for x in (q, k, v)), is_causal=True)
    assert output_error(o, expected.transpose(1, 2)).wrong_reason(DType.BF16) is None


def test_a_deterministic_peer_runs_with_pytorchs_switch_and_puts_it_back() -> None:
    q, k, v = PROBLEM.inputs(CPU)
    peer = dataclasses.replace(PEERS["fa2-deterministic"], devices=("cpu",))
    settings = torch.utils.deterministic
    with peer.prepare(PROBLEM, q, k, v).context():
        assert torch.are_deterministic_algorithms_enabled()
        assert not settings.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert settings.fill_uninitialized_memory


def test_names_of_peers() -> None:
    assert [peer.name for peer in select_peers("default")] == list(DEFAULT_PEERS)
    assert [peer.name for peer in select_peers("all")] == list(PEERS)
    assert select_peers("none") == []
    with pytest.raises(ValueError, match="unknown peer 'fa5'; known: fa2"):
        select_peers("fa2,fa5")
