"""Forward kernels for ``sanitizer.py``: which, and one launch of each."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from flash_attention.backends import cuda
from flash_attention.backends.cuda import UNBOUNDED, Features
from flash_helpers.kernel_configs import DType, ForwardKernel, ForwardTraits, choose_hopper_kernel
from flash_helpers.kernels.ampere.forward.choices import choose_ampere_kernel
from flash_helpers.kernels.ampere.forward.decode import choose_ampere_decode_config
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.test.reference import reference

KINDS = (
    "", "causal", "window", "softcap sinks", "varlen causal", "split", "varlen split", "varlen split paged",
    "varlen paged", "padded_head",
)  # fmt: skip
TOLERANCE = 1.6e-2  # bf16


@dataclass(frozen=True)
class Lengths:
    """Queries and keys of each sequence, and the tensors' head size."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    d: int


def kernels(facts: DeviceFacts) -> list[ForwardKernel]:
    """Each kind of both families, as far as the GPU runs them, at head size 128."""
    found = []
    for names in KINDS:
        traits = ForwardTraits(**dict.fromkeys(names.split(), True))
        if traits.split:
            found.append(ForwardKernel(choose_ampere_decode_config(DType.BF16, 128, facts), traits))
        else:
            tuned, _ = choose_ampere_kernel(DType.BF16, 128, traits.causal, 512, facts.capability, lse=True)
            found.append(ForwardKernel(tuned.config, traits))
        if facts.capability == (9, 0):
            length = 1 if traits.split else 512
            found.append(choose_hopper_kernel(DType.BF16, 128, traits.causal, length, traits=traits)[0])
    return found


def run(kernel: ForwardKernel) -> None:
    """Launches once; packed sequences once more, of which a longer one has more queries than announced."""
    launch(kernel)
    if kernel.traits.varlen and not kernel.traits.paged:
        launch(kernel, announced=40)


def launch(kernel: ForwardKernel, announced: int | None = None) -> None:
    """Launches once and compares with the float64 reference.

    Args:
        announced: packed sequences only, the queries of the longest one as the launch is told; those that
            have more are compared no further than that nothing but their own output is written.
    """
    traits = kernel.traits
    packed = traits.varlen and not traits.paged
    d = kernel.config.d_head - (24 if traits.padded_head else 0)
    lengths = Lengths((70, 1, 33), (130, 65, 40), d) if packed else Lengths((65, 65), (200, 200), d)
    if traits.split and not packed:
        lengths = Lengths((4, 4), (300, 300), d)
    if traits.paged:
        lengths = Lengths(lengths.q, (320, 320), d)
    batch, longest_q, longest_k = len(lengths.q), announced or max(lengths.q), max(lengths.k)
    generator = torch.Generator().manual_seed(0)

    def rows(counts: tuple[int, ...], heads: int) -> torch.Tensor:
        shape = (1, sum(counts)) if packed else (batch, counts[0])
        return torch.randn(*shape, heads, d, generator=generator).bfloat16()

    q, k, v = rows(lengths.q, 4), rows(lengths.k, 2), rows(lengths.k, 2)
    on_gpu = [x.cuda() for x in (q, k, v)]
    o = torch.full_like(q, torch.nan, device="cuda")
    lse = torch.empty((4, q.shape[1]) if packed else (batch, 4, longest_q), device="cuda")
    ends = [
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32).cuda() for n in (lengths.q, lengths.k)
    ]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    sinks_on_gpu = sinks.cuda()
    parts = 3
    partial_o = torch.empty(parts, batch, 4, longest_q, d, device="cuda")
    partial_lse = torch.empty(parts, batch, 4, longest_q, device="cuda")
    window = (40, 7) if traits.window else (None, None)
    features = Features(
        d_head_v=d,
        window_left=40 if traits.window else UNBOUNDED,
        window_right=7 if traits.window else UNBOUNDED,
        softcap=20.0 if traits.softcap else 0.0,
        sinks=sinks_on_gpu.data_ptr() if traits.sinks else 0,
        cu_seqlens_q=ends[0].data_ptr() if packed else 0,
        cu_seqlens_k=ends[1].data_ptr() if packed else 0,
        total_q=q.shape[1] if packed else 0,
        total_k=k.shape[1] if packed else 0,
        n_splits=parts if traits.split else 1,
        partial_o=partial_o.data_ptr() if traits.split else 0,
        partial_lse=partial_lse.data_ptr() if traits.split else 0,
    )
    if traits.paged:  # the last page comes first; the first item has one that is not there
        page_size = 80
        on_gpu[1:] = [x.view(-1, page_size, *x.shape[2:]).flip(0) for x in on_gpu[1:]]
        n_pages = on_gpu[1].shape[0]
        table = torch.arange(n_pages - 1, -1, -1, dtype=torch.int32, device="cuda")
        table[1] = -1
        used = torch.tensor([300, 317], dtype=torch.int32, device="cuda")
        features = features._replace(
            block_table=table.data_ptr(), max_pages=n_pages // batch, page_size=page_size,
            seqused_k=used.data_ptr(),
        )  # fmt: skip
        lengths = Lengths(lengths.q, tuple(used.tolist()), d)

    def launched(x: torch.Tensor, longest: int) -> torch.Tensor:
        return x[:, :longest].expand(batch, -1, -1, -1) if packed else x

    q_in, k_in, v_in = (
        launched(x, n) for x, n in zip(on_gpu, (longest_q, longest_k, longest_k), strict=True)
    )
    cuda.forward(kernel, q_in, k_in, v_in, launched(o, longest_q), lse, d**-0.5, features)
    torch.cuda.synchronize()
    result = o.cpu()
    for b in range(batch):
        at_q = slice(sum(lengths.q[:b]), sum(lengths.q[: b + 1]))
        at_k = slice(sum(lengths.k[:b]), sum(lengths.k[: b + 1]))
        if packed:
            mine, one_q, one_k, one_v = result[:, at_q], q[:, at_q], k[:, at_k], v[:, at_k]
        else:
            mine, one_q, one_k, one_v = (x[b : b + 1] for x in (result, q, k, v))
            one_k, one_v = one_k[:, : lengths.k[b]], one_v[:, : lengths.k[b]]
        if traits.paged and b == 0:
            continue  # its result means nothing
        if lengths.q[b] > longest_q:
            assert mine[:, longest_q:].isnan().all(), "rows beyond those that were announced are written"
            continue
        expected, _ = reference(
            one_q, one_k, one_v, causal=traits.causal, window=window,
            softcap=20.0 if traits.softcap else 0.0, sinks=sinks if traits.sinks else None,
        )  # fmt: skip
        torch.testing.assert_close(mine.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)
