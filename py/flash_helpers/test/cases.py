"""One attention call as a value: drawn at random by tests, repeated from its text when it fails.

With ``page_size`` it is a call of ``attention_cached``, whose keys lie in pages, else one of ``attention``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.parsing import parse_kernel_name_into_config
from flash_helpers.kernels.problem import AttentionProblem, visible_limits
from flash_helpers.test.gradients import NAMES as GRADIENTS
from flash_helpers.test.gradients import check_gradients
from flash_helpers.test.reference import reference

LAYOUTS = ("contiguous", "transposed", "strided", "packed", "offset", "last_stride", "one_batch", "one_head")
TOLERANCES = {DType.FP16: 2e-3, DType.BF16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    """Shape, features, layouts and inputs of one call of ``attention``.

    Attributes:
        n_heads_kv: kv heads; query heads are ``group`` times as many.
        softmax_scale, softcap, window, causal, diagonal_offset: as in ``attention``.
        sinks: with sinks.
        magnitude: q and k are standard normal times this.
        layouts: of q, k and v, out of ``LAYOUTS``.
        seed: of the inputs.
        config: short form of the configuration that the call names; empty: the library chooses.
        gradients: also differentiates: a loss of output and LSE, gradients against float64.
        backward_config: short form of the configuration that the call names for its gradients; empty: none.
        page_size: rows of a page of the cache that k and v are, of seq_len_k rows, a multiple of it, a batch
            item; 0: they are none. ``one_batch`` as a layout of k or v makes all pages equal.
        used: with ``page_size``, how many keys of each batch item there are.
    """

    dtype: DType
    batch: int
    seq_len_q: int
    seq_len_k: int
    n_heads_kv: int
    group: int
    d_head: int
    d_head_v: int
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softmax_scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    magnitude: float = 1.0
    layouts: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")
    seed: int = 0
    config: str = ""
    page_size: int = 0
    used: tuple[int, ...] = ()
    diagonal_offset: int = 0
    gradients: bool = False
    backward_config: str = ""

    @property
    def deterministic(self) -> bool:
        """Whether gradients have to be the same bits in every run."""
        return self.seed % 2 == 1

    @property
    def problem(self) -> AttentionProblem:
        """The call as ``select`` sees it."""
        from flash_attention.call import shifted

        mask = shifted(self.causal, self.window, self.diagonal_offset)
        left, right = visible_limits(*mask, self.seq_len_q, self.seq_len_k)
        in_pages = self.page_size > 0
        return AttentionProblem(
            self.dtype, self.batch, self.seq_len_q, self.seq_len_k, self.n_heads_kv * self.group,
            self.n_heads_kv, self.d_head, self.d_head_v, left, right, self.softcap > 0, self.sinks,
            lse=True, varlen=in_pages, cached=in_pages, paged=in_pages,
            tma_obstacle="broadcast" if any(name.startswith("one_") for name in self.layouts) else None,
        )  # fmt: skip

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v and sinks, each q, k, v in its layout with NaN around it; k and v perhaps in pages."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.n_heads_kv * self.group
        shapes = (
            (self.batch, self.seq_len_q, heads, self.d_head),
            (self.batch, self.seq_len_k, self.n_heads_kv, self.d_head),
            (self.batch, self.seq_len_k, self.n_heads_kv, self.d_head_v),
        )
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
        dtype = self.dtype.to_torch_dtype()
        if self.page_size:
            k, v = (self._in_pages(x) for x in (k, v))
        q, k, v = (
            laid_out(x.to(dtype).to(device), layout)
            for x, layout in zip((self.magnitude * q, self.magnitude * k, v), self.layouts, strict=True)
        )
        sinks = torch.randn(heads, generator=generator).to(device) if self.sinks else None
        return q, k, v, sinks

    def block_table(self) -> Tensor:
        """(batch, max_pages) int32, in random order; entries behind an item's last key name no page."""
        max_pages = self.seq_len_k // self.page_size
        order = torch.randperm(self.batch * max_pages, generator=torch.Generator().manual_seed(self.seed))
        table = order.view(self.batch, max_pages).int()
        for item, n in enumerate(self.used):
            table[item, -(-n // self.page_size) :] = (-1, 2**31 - 1)[item % 2]
        return table

    def _in_pages(self, x: Tensor) -> Tensor:
        """(batch, seq_len_k, heads, d) as (pages, page_size, heads, d); NaN where there is no key."""
        table = self.block_table()
        pages = x.new_full((max(1, table.numel()), self.page_size, *x.shape[2:]), math.nan)
        for item, n in enumerate(self.used):
            for first in range(0, min(n, self.seq_len_k), self.page_size):
                rows = x[item, first : min(first + self.page_size, n)]
                pages[int(table[item, first // self.page_size]), : len(rows)] = rows
        return pages

    def _expected(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Output and LSE of the reference."""
        if not self.page_size:
            return reference(q, k, v, **options)
        out, lse = reference(q, q[:, :0], q[:, :0, :, :1].expand(-1, -1, -1, self.d_head_v))
        for item, (pages, n) in enumerate(zip(self.block_table(), self.used, strict=True)):
            n = min(n, self.seq_len_k)
            mine = pages[: -(-n // self.page_size)].long()
            keys, values = (x[mine].flatten(0, 1)[None, :n] for x in (k, v))
            out[item : item + 1], lse[item : item + 1] = reference(
                q[item : item + 1], keys, values, **options
            )
        return out, lse

    def check(self, device: str) -> None:
        """Runs ``attention`` and compares with the float64 reference.

        Raises:
            AssertionError: wrong; the message has the line that repeats it.
            what ``attention`` raises.
        """
        from flash_attention import attention
        from flash_attention.cached import attention_cached

        q, k, v, sinks = self.inputs(device)
        if self.gradients:
            self._check_gradients(device, q, k, v, sinks)
            return
        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "sinks": sinks,
            "diagonal_offset": self.diagonal_offset,
        }
        config: Any = parse_kernel_name_into_config(self.config) if self.config else None
        if self.page_size:
            table, used = self.block_table().to(device), torch.tensor(self.used, dtype=torch.int32).to(device)
            o, lse = attention_cached(
                q, k, v, used, block_table=table, return_lse=True, config=config, **options
            )
        else:
            o, lse = attention(q, k, v, return_lse=True, config=config, **options)
        # The reference takes the rows one by one, which for such small tensors is quicker on the CPU.
        o, lse, q, k, v = o.cpu(), lse.cpu(), q.cpu(), k.cpu(), v.cpu()
        expected, expected_lse = self._expected(q, k, v, options)
        tolerance = TOLERANCES[self.dtype]
        right = torch.allclose(o.double(), expected, atol=tolerance, rtol=tolerance)
        lse_right = torch.allclose(lse.double(), expected_lse, atol=1e-3, rtol=2e-6)
        if not (right and lse_right):
            raise AssertionError(
                f"{'output' if not right else 'lse'} is wrong by {_largest(o, expected):.2g} (output), "
                f"{_largest(lse, expected_lse):.2g} (lse). To repeat it:\n"
                f"{self.repeat_command(device)}"
            )

    def _check_gradients(self, device: str, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
        """Differentiates the call by autograd."""
        from flash_attention import attention

        options: dict[str, Any] = {
            "causal": self.causal,
            "window": self.window,
            "softmax_scale": self.softmax_scale,
            "softcap": self.softcap,
            "diagonal_offset": self.diagonal_offset,
        }
        named: Any = parse_kernel_name_into_config(self.backward_config) if self.backward_config else None
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        if sinks is not None:
            inputs.append(sinks.detach().requires_grad_())
        out, lse = attention(
            *inputs[:3], sinks=inputs[3] if sinks is not None else None, return_lse=True,
            deterministic=self.deterministic, backward_config=named, **options,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(self.seed)
        dout = torch.randn(out.shape, generator=generator).to(out.dtype).to(device)
        dlse = torch.randn(lse.shape, generator=generator).to(device)
        dlse = dlse.masked_fill(lse == -math.inf, 0.0)
        found = torch.autograd.grad((out, lse), inputs, (dout, dlse))
        try:
            check_gradients(
                dict(zip(GRADIENTS, (x.cpu() for x in found), strict=False)),
                q.detach().cpu(), k.detach().cpu(), v.detach().cpu(), dout.cpu(), dlse.cpu(),
                rounding=TOLERANCES[self.dtype], few_keys=True, out=out.detach().cpu(),
                sinks=None if sinks is None else sinks.cpu(), **options,
            )  # fmt: skip
        except AssertionError as error:
            raise AssertionError(f"{error}. To repeat it:\n{self.repeat_command(device)}") from None

    def repeat_command(self, device: str) -> str:
        """The shell line that checks this case again."""
        return f'python -c "from flash_helpers.test.cases import *; {self}.check({device!r})"'

    def __str__(self) -> str:
        return repr(self).replace(repr(self.dtype), str(self.dtype.to_cpp_str()).replace("::", "."))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x (batch, seq, heads, d) as a view of a larger storage that holds NaN elsewhere.

    The ``one_…`` layouts take x's first entry along that dimension for all of it, by a stride of 0.
    """
    batch, seq, heads, d = x.shape
    if layout == "one_batch":
        return _guarded(x[:1]).expand(batch, -1, -1, -1)
    if layout == "one_head":
        return _guarded(x[:, :, :1]).expand(-1, -1, heads, -1)
    if layout == "transposed":
        return _guarded(x.transpose(1, 2)).transpose(1, 2)
    if layout == "last_stride":
        return _guarded(x.transpose(2, 3)).transpose(2, 3)
    if layout == "packed":
        return x.new_full((batch, seq, 3, heads, d), math.nan)[:, :, 1].copy_(x)
    if layout == "strided":
        return x.new_full((batch, 2 * seq, heads + 1, d + 8), math.nan)[:, ::2, 1:, 8:].copy_(x)
    return _guarded(x, 9 if layout == "offset" else 8)


def _guarded(x: Tensor, elements: int = 8) -> Tensor:
    """A contiguous copy with ``elements`` of NaN on both sides; 8 keep it at a multiple of 16 bytes."""
    storage = x.new_full((x.numel() + 2 * elements,), math.nan)
    return storage[elements : elements + x.numel()].view(x.shape).copy_(x)


def _largest(actual: Tensor, expected: Tensor) -> float:
    difference = torch.where(actual == expected, 0.0, (actual - expected).abs())
    return difference.max().item() if difference.numel() else 0.0
