"""The runner of PyTorch's context-parallel tests, on a small file made like theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_torch_context_parallel import main

pytestmark = pytest.mark.compile  # takes long: processes of their own

TESTS = """
import unittest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._attention import (
    _cp_options, _HeadTailLoadBalancer, _RotateMethod, context_parallel, context_parallel_unshard
)
from torch.nn.attention import SDPBackend
from torch.testing._internal.common_cuda import PLATFORM_SUPPORTS_FLASH_ATTENTION
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

class RingAttentionTest(DTensorTestBase):
    @with_comms
    def test_ring_attention_sdpa(self):
        axes = {"is_causal": [True, False], "load_balance": [True, False], "wrong": [False, True]}
        self.run_subtests({**axes, "rotater": list(_RotateMethod)}, self.one)

    def one(self, is_causal, load_balance, wrong, rotater):
        _cp_options.enable_load_balance = load_balance
        mesh = init_device_mesh(self.device_type, (self.world_size,), mesh_dim_names=("cp",))
        q, k, v = (torch.randn(1, 2, 20, 16).bfloat16() for _ in range(3))
        wanted = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal != wrong)
        with context_parallel(mesh, buffers=(q, k, v), buffer_seq_dims=(2, 2, 2)):
            assert q.shape[2] == 10
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        assert q.shape[2] == 20
        (out,) = context_parallel_unshard(mesh, [out], [2])
        torch.testing.assert_close(out, wanted, atol=2e-2, rtol=1e-2)
"""


def test_what_becomes_of_each_case(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test_attention.py"
    path.write_text(TESTS)
    assert main([str(path)]) == 1
    said = capfd.readouterr().out
    # Three of the four pairs of axes are PyTorch's, each with three methods on two ranks.
    assert "RingAttentionTest.test_ring_attention_sdpa: 9 passed, 18 failed" in said
    assert "8 do not apply: counts the collectives of PyTorch's ring" in said
    assert "2 do not apply: PyTorch's test leaves it out" in said
    assert "'wrong': True" in said
    assert "'wrong': False" not in said


def test_a_test_that_is_not_known_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test_attention.py"
    path.write_text(
        TESTS.replace('"wrong": [False, True]', '"wrong": [False]') + "    def test_new(self): pass\n"
    )
    assert main([str(path)]) == 1
    said = capfd.readouterr().out
    assert "test_ring_attention_sdpa: 9 passed, 0 failed" in said
    assert "RingAttentionTest.test_new: unknown" in said
