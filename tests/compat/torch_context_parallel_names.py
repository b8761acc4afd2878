"""The names of PyTorch's context parallelism that its own tests use, as this library's functions.

Which rows a rank holds is a ``Layout``: contiguous, or what a load balancer of PyTorch's says. Sequences are
the dimension 2 there, 1 here.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, create_block_mask, create_mask

from flash_attention import distributed as cp
from flash_attention.call import Mask

sys.path.append(str(Path(__file__).parents[1] / "distributed"))
from float32_path import in_float32


class DoesNotApplyError(Exception):
    """A case that asks for what is PyTorch's alone; the message says why."""


class Names:
    """What a rank knows between the calls of a test.

    Attributes:
        method: of this library, for the calls that follow.
        calls: how many this library has computed.
    """

    def __init__(self) -> None:
        self.method = "all_gather"
        self.calls = 0
        self._layout = cp.Layout.contiguous(0, 1)
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self._alone = groups[dist.get_rank()]
        self._plain_sdpa = torch.nn.functional.scaled_dot_product_attention

    # ------------------------------------------------------------------ attention
    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """``scaled_dot_product_attention`` of this rank's rows."""
        self.calls += 1
        local = [x.transpose(1, 2) for x in (q, k, v)]
        out = cp.attention(*local, layout=self._layout, causal=is_causal, method=self.method)  # type: ignore[arg-type]
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    def flex(
        self, q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, return_aux: Any
    ) -> tuple[Tensor, AuxOutput]:
        """``flex_attention`` of this rank's rows, in float32; of a block mask it takes the function."""
        self.calls += 1
        local = [x.transpose(1, 2) for x in (q, k, v)]
        out, lse = in_float32(
            *local, layout=self._layout, method=self.method, mask=Mask.of(False, (None, None)),
            functions=(None, block_mask.mask_mod),
        )  # fmt: skip
        return out.transpose(1, 2), AuxOutput(lse=lse)

    def flex_alone(
        self, q: Tensor, k: Tensor, v: Tensor, *, block_mask: BlockMask, return_aux: Any
    ) -> tuple[Tensor, AuxOutput]:
        """What the tests compare with: one rank, as theirs is one GPU. PyTorch's has no gradients on CPUs."""
        local, mod = [x.transpose(1, 2) for x in (q, k, v)], block_mask.mask_mod
        out, lse = in_float32(
            *local, layout=cp.Layout.contiguous(q.shape[2], 1), method="ring",
            mask=Mask.of(False, (None, None)), functions=(None, mod), group=self._alone,
        )  # fmt: skip
        visible = create_mask(mod, *block_mask.shape[:2], q.shape[2], k.shape[2], device=q.device)
        scores = (q.double() @ k.double().mT * q.shape[3] ** -0.5).masked_fill(~visible, -torch.inf)
        torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
        exact = scores.softmax(-1) @ v.double()
        torch.testing.assert_close(out.transpose(1, 2).double(), exact, rtol=1e-5, atol=1e-5)
        return out.transpose(1, 2), AuxOutput(lse=lse)

    def sdpa_alone(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """What the tests compare with: PyTorch's, rounded once. On CPUs it rounds bfloat16 sums before."""
        return self._plain_sdpa(q.float(), k.float(), v.float(), is_causal=is_causal).to(q.dtype)

    # ------------------------------------------------------------------ rows
    def _take(self, total: int, world: int, balancer: Any) -> None:
        if balancer is None:
            self._layout = cp.Layout.contiguous(total, world)
            return
        places = balancer._generate_indices()
        if places.dim() == 2 and places.shape[0] != 1:
            raise DoesNotApplyError(
                "each item of the batch has a layout of its own; a Layout is that of all items"
            )
        self._layout = cp.Layout.explicit([part.tolist() for part in places.flatten().chunk(world)])

    def shard(
        self, mesh: Any, buffers: Sequence[Any], seq_dims: Sequence[int], load_balancer: Any = None
    ) -> list[Any]:
        """``_context_parallel_shard``; block masks stay what they are."""
        self._take(buffers[0].shape[seq_dims[0]], mesh.size(), load_balancer)
        rank = mesh.get_local_rank()
        return [
            x if isinstance(x, BlockMask) else self._layout.shard(x, rank, dim)
            for x, dim in zip(buffers, seq_dims, strict=True)
        ]

    def unshard(
        self, mesh: Any, buffers: Sequence[Tensor], seq_dims: Sequence[int], load_balancer: Any = None
    ) -> list[Tensor]:
        """``context_parallel_unshard``, by the layout of the last sharding."""
        return [
            cp.gather(x.detach(), self._layout, mesh, dim) for x, dim in zip(buffers, seq_dims, strict=True)
        ]

    def context(self, balanced: Callable[[], bool], head_tail: Callable[..., Any]) -> Callable[..., Any]:
        """``context_parallel``: cuts buffers in place, and makes SDPA this library's within."""

        @contextmanager
        def context_parallel(
            mesh: Any, *, buffers: Sequence[Tensor], buffer_seq_dims: Sequence[int]
        ) -> Iterator[None]:
            total, whole = buffers[0].shape[buffer_seq_dims[0]], [x.detach().clone() for x in buffers]
            balancer = head_tail(total, mesh.size(), buffers[0].device) if balanced() else None
            for x, part in zip(buffers, self.shard(mesh, whole, buffer_seq_dims, balancer), strict=True):
                x.resize_(part.shape).copy_(part)
            plain = torch.nn.functional.scaled_dot_product_attention
            torch.nn.functional.scaled_dot_product_attention = self.sdpa
            try:
                yield
            finally:
                torch.nn.functional.scaled_dot_product_attention = plain
                for x, original in zip(buffers, whole, strict=True):
                    x.resize_(original.shape).copy_(original)

        return context_parallel

    def parallelize(self, module: torch.nn.Module, mesh: Any, plan: Any) -> torch.nn.Module:
        """``parallelize_module`` with a plan of ``_ContextParallel``."""
        module.forward = self.flex if plan.attention_type.name == "FLEX" else self.sdpa  # type: ignore[method-assign]
        return module

    def install(self, module: ModuleType) -> None:
        """Gives the names of a test module this library's meaning."""
        theirs = vars(module)
        options, head_tail = theirs["_cp_options"], theirs["_HeadTailLoadBalancer"]
        torch.nn.functional.scaled_dot_product_attention = self.sdpa_alone  # type: ignore[assignment]
        theirs.update(
            context_parallel=self.context(lambda: options.enable_load_balance, head_tail),
            _context_parallel_shard=self.shard,
            context_parallel_unshard=self.unshard,
            parallelize_module=self.parallelize,
            _enable_context_parallel_dispatcher=lambda: None,
            _disable_context_parallel_dispatcher=lambda: None,
            compiled_flex_attention=self.flex_alone,
            compiled_create_block_mask=create_block_mask,
            backends=[theirs["SDPBackend"].FLASH_ATTENTION, theirs["SDPBackend"].EFFICIENT_ATTENTION],
        )


# ---------------------------------------------------------------------- of the test suite
def install_test_modules() -> None:
    """The modules of PyTorch's test suite that the file imports, for ranks that this runner has started."""

    def unchanged(*given: Any, **options: Any) -> Any:
        return lambda function: function

    def module(name: str, **members: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(members)
        sys.modules[name] = made

    platforms = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "FUSED_ATTENTION", "MEM_EFF_ATTENTION")
    suite = "torch.testing._internal"
    module(f"{suite}.common_cuda", **{f"PLATFORM_SUPPORTS_{name}": True for name in platforms})
    module(f"{suite}.common_distributed", skip_if_lt_x_gpu=unchanged)
    module(f"{suite}.common_utils", run_tests=lambda: None, skipIfRocm=lambda function: function)
    for name in ("", "._tensor"):
        module(f"{suite}.distributed{name}")
        sys.modules[f"{suite}.distributed{name}"].__path__ = []  # a package
    module(
        f"{suite}.distributed._tensor.common_dtensor",
        DTensorTestBase=Base,
        with_comms=lambda function: function,
        create_local_tensor_test_class=lambda *given, **options: None,
        map_local_tensor_for_rank=lambda value, rank, function: function(value, rank),
    )


class Base(unittest.TestCase):
    """``DTensorTestBase`` in a process that is a rank already."""

    device_type = "cpu"

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def assertEqual(self, first: Any, second: Any, msg: Any = None) -> None:
        """Of tensors, too, as PyTorch's test case has it."""
        if isinstance(first, Tensor):
            torch.testing.assert_close(first, second, rtol=0, atol=0)
        else:
            assert first == second, msg
