"""Private names of torch: each may be gone, and everything still imports, runs and refuses."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from flash_attention import torch_private

ROOT = Path(__file__).parents[2]

# Takes a name away while the library is imported, then gives it back: torch itself may need it, and would
# have moved it together with its own uses. Each name has a process of its own, forked from one that knows
# torch.
WITHOUT_EACH_NAME = """
import importlib.util, os, sys, traceback
import torch
import torch._dynamo

def calls(compiled):
    import flash_attention
    from flash_attention import attention, attention_varlen, torch_private
    from flash_attention.backends import cuda
    from flash_attention.flash_attn_interface import flash_attn_with_kvcache

    q = torch.randn(2, 9, 2, 32).half()
    expected = torch.nn.functional.scaled_dot_product_attention(*3 * [q.float().transpose(1, 2)])
    def right(out):
        torch.testing.assert_close(out.float(), expected.transpose(1, 2), atol=4e-3, rtol=4e-3)
    def refused(call, *errors):
        try:
            call()
        except errors:
            return
        raise AssertionError("accepted")

    right(attention(q, q, q))
    right(attention(q, q, q, out=torch.empty_like(q)))
    offsets = torch.tensor([0, 9, 18]).int()
    right(attention_varlen(*3 * [q.flatten(0, 1)], offsets, offsets, 9, 9).view_as(q))
    cache = torch.zeros(2, 16, 2, 32).half()
    right(flash_attn_with_kvcache(q, cache, cache.clone(), q, q, cache_seqlens=0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*3 * [q.float()]).dtype is torch.bfloat16
        if compiled:
            layer = torch.compile(attention, backend="aot_eager", fullgraph=True)
            assert layer(*3 * [q.float()]).dtype is torch.bfloat16
    traced = torch.jit.trace(lambda x: attention(x, x, x), q, check_trace=False)
    assert "flash_attention::attention" in str(traced.graph)
    assert attention(*3 * [q.to("meta")]).is_meta
    grad, = torch.autograd.grad(attention(q.requires_grad_(), q, q).sum(), q)
    assert grad.any()
    q.requires_grad_(False)
    unknown = (NotImplementedError, ValueError, RuntimeError)
    try:
        right(torch.func.vmap(lambda x: attention(x, x, x))(q[None])[0])
    except unknown:
        pass
    refused(lambda: torch.func.jvp(lambda x: attention(x, x, x), (q,), (q,)), *unknown)
    flash_attention.forward  # and what only CUDA tensors need
    assert callable(cuda.maker_like(q))
    from flash_attention.scaled_dot_product import register_with_torch
    register_with_torch()

def without(path):
    *parents, name = path.split(".")
    place = torch
    for parent in parents:
        place = getattr(place, parent)
    there = hasattr(place, name)
    if there:
        value = getattr(place, name)
        delattr(place, name)
    # That module alone: torch uses names of its own, too, where others of the package ask it for something.
    known = importlib.util.spec_from_file_location("flash_attention.torch_private", sys.argv[1])
    module = sys.modules[known.name] = importlib.util.module_from_spec(known)
    known.loader.exec_module(module)
    if there:
        setattr(place, name, value)
    calls(compiled="ispatch" in path)  # what a compiler goes through

for path in sys.argv[2:]:
    child = os.fork()
    if not child:
        try:
            without(path)
        except BaseException:
            print(path)
            traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(path, "ended with status", status)
"""


def test_each_private_name_may_be_gone() -> None:
    assert len(torch_private.NAMES) > 10
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        WITHOUT_EACH_NAME,
        torch_private.__file__,
        *torch_private.NAMES,
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "", result.stderr[-2000:]


def test_no_other_module_names_a_private_part_of_torch() -> None:
    found = []
    for path in (ROOT / "flash_attention").rglob("*.py"):
        if path.name == "torch_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Attribute):
                names = ast.unparse(node).split(".")
                names = names if names[0] in ("torch", "Tensor", "forward_ad") else []
            elif isinstance(node, ast.ImportFrom | ast.Import):
                stem = node.module if isinstance(node, ast.ImportFrom) else ""
                full = [f"{stem}.{alias.name}".strip(".") for alias in node.names]
                names = [part for name in full if name.split(".")[0] == "torch" for part in name.split(".")]
            if any(n.startswith("_") and not n.startswith("__") for n in names):
                found.append(f"{path.name}: {ast.unparse(node)}")
    assert found == []
