"""``forward`` and ``forward_timed`` as a user calls them, and what importing the package does."""

from __future__ import annotations

import inspect
import subprocess
import sys
import weakref

import pytest
import torch

import flash_attention
from flash_attention.cached import attention_cached
from flash_attention.options import Keywords, Options
from flash_helpers.kernel_configs import DType, FlashForwardKernelConfig
from flash_helpers.test.utils import QKVConfig, evaluate_kernel, generate_qkv, generate_qkvo

CONFIG = FlashForwardKernelConfig(DType.BF16, 128, 64, 64, 4, True, True, True, 2, 2, 2, True, True)
INPUTS = QKVConfig(2, 128, 3, 128, DType.BF16)


def test_new_output():
    q, k, v = generate_qkv(INPUTS)
    o = flash_attention.forward(CONFIG, q.transpose(0, 0), k, v)
    assert (o.shape, o.dtype, o.device) == (q.shape, q.dtype, q.device)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert flash_attention.forward(CONFIG, transposed, k, v).is_contiguous()


def test_given_output_is_filled_and_returned():
    q, k, v, o = generate_qkvo(INPUTS)
    assert flash_attention.forward(CONFIG, q, k, v, o) is o
    assert torch.equal(o, flash_attention.forward(CONFIG, q, k, v))


def test_given_output_with_strides_of_its_own():
    q, k, v, _ = generate_qkvo(INPUTS)
    around = torch.full((2, 3, 256, 256), 7.0, dtype=torch.bfloat16)
    o = around[:, :, 64:192, :128].transpose(1, 2)
    flash_attention.forward(CONFIG, q, k, v, o)
    assert torch.equal(o, flash_attention.forward(CONFIG, q, k, v))
    o.fill_(7.0)
    assert (around == 7).all()


def test_timed():
    q, k, v, o = generate_qkvo(INPUTS)
    timed, milliseconds = flash_attention.forward_timed(CONFIG, q, k, v, o)
    assert timed is o
    assert torch.equal(o, flash_attention.forward(CONFIG, q, k, v))
    assert 0 < milliseconds < 2000


@pytest.mark.parametrize("shape", [(0, 64, 2, 128), (2, 0, 2, 128), (2, 64, 0, 128), (0, 0, 0, 128)])
def test_empty(shape):
    q = torch.empty(shape, dtype=torch.bfloat16)
    o = flash_attention.forward(CONFIG, q, q, q)
    assert (o.shape, o.dtype) == (q.shape, q.dtype)
    o, milliseconds = flash_attention.forward_timed(CONFIG, q, q, q)
    assert o.shape == q.shape
    assert milliseconds == 0


def test_no_reference_to_the_tensors_is_kept():
    q, k, v, o = generate_qkvo(INPUTS)
    flash_attention.forward(CONFIG, q, k, v, o)
    alive = [weakref.ref(x) for x in (q, k, v, o)]
    del q, k, v, o
    assert not any(x() is not None for x in alive)


def test_evaluate_kernel():
    evaluation = evaluate_kernel(CONFIG, INPUTS)
    assert evaluation.right
    assert 0 < evaluation.error.max_abs < 0.02
    assert evaluation.milliseconds > 0


@pytest.mark.parametrize(
    "function", [flash_attention.attention, flash_attention.attention_varlen, attention_cached]
)
def test_one_list_of_keywords(function):
    """The record of a call's options, the keywords of its overloads and its signature name the same."""
    parameters = inspect.signature(function).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name in ("validate", "block_table", "seqused_q", "seqused_k", "n_splits"):
        own.pop(name, None)
    assert own.pop("diagonal_offset") == 0  # becomes a part of the window before anything else
    assert own == Options._field_defaults
    assert {*Keywords.__annotations__, "return_lse"} == {*Options._fields, "diagonal_offset"}


def test_import_starts_no_cuda_and_works_without_a_gpu():
    program = """
import sys, torch
import flash_attention
from flash_attention.cached import attention_cached
from flash_attention.options import Keywords, Options
from flash_helpers.kernel_configs import get_kernels_to_build
assert get_kernels_to_build()
assert not torch.cuda.is_initialized()
assert "flash_attention_kernels" not in sys.modules
assert "flash_attention.backends.cuda" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
