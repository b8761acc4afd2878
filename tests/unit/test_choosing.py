"""Choices on a device, with a CUDA backend acted by the CPU's: padding, alignment, building, caching."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math

import pytest
import torch

from flash_attention import (
    attention,
    attention_varlen,
    explain_choice,
    last_kernel,
    prepare,
)
from flash_attention.backends import backend, cpu
from flash_attention.backends import cuda as cuda_backend
from flash_attention.backends.without_keys import fill_without_keys
from flash_attention.call import Call, Mask, Scores, problem_of
from flash_attention.errors import NoKernelError
from flash_attention.layouts import Cached, Packed
from flash_attention.run import availability, choices, cuda_choice
from flash_helpers import build, generation
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.kernels.direction import ALL_TRAITS
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.problem import AttentionProblem, visible_limits
from flash_helpers.results.lookup import TuningResults
from flash_helpers.select.select import select
from flash_helpers.test.utils import QKVConfig, generate_qkv, ramp, reference

H100 = device_facts("H100")
CUDA = torch.device("cuda", 0)
PROBLEM = AttentionProblem(DType.FP16, 2, 100, 90, 4, 2, 64, 64)


CAUSAL = Mask(right=0)


def run(choice, problem, call):
    """Launches a call, which is the problem that was chosen for but for what matters to nobody here."""
    assert dataclasses.replace(call.problem, lse=problem.lse, tma_obstacle=None) == problem
    return cuda_backend.run(call, choice)


class ActedCuda:
    """The functions of the CUDA backend that choices calls; kernels compute on the CPU."""

    def __init__(self) -> None:
        self.built: set = set()
        self.loaded: list = []
        self.launches: list = []

    def device_facts_of(self, device):
        return H100

    def load_kernel(self, kernel, target):
        return kernel if kernel in self.built else None

    def get_kernel(self, kernel, device):
        self.loaded.append(kernel)
        self.built.add(kernel)

    def build_obstacle(self):
        return None

    def forward(self, kernel, q, k, v, o, lse, softmax_scale, features=None, mod=None):
        for x in (q, k, v, o):
            assert x.ndim == 4
            assert x.shape[3] == kernel.config.d_head or kernel.traits.padded_head
            assert x.stride(3) == 1
            assert x.data_ptr() % 16 == 0
            assert all(n == 1 or s % 8 == 0 for n, s in zip(x.shape[:3], x.stride()[:3], strict=True))
        assert softmax_scale >= 0
        self.launches.append(kernel)
        if features is None:
            cpu.forward(kernel, q, k, v, o, lse, softmax_scale)
            return
        options = {
            "left": None if features.window_left == cuda_backend.UNBOUNDED else features.window_left,
            "right": None if features.window_right == cuda_backend.UNBOUNDED else features.window_right,
            "softcap": features.softcap,
            "sinks": read(features.sinks, ctypes.c_float, q.shape[2]) if features.sinks else None,
        }
        assert kernel.traits.split == (features.n_splits > 1)
        assert kernel.traits.split == (features.partial_o != 0) == (features.partial_lse != 0)
        if features.seqused_k:
            used = read(features.seqused_k, ctypes.c_int32, q.shape[0]).tolist()
            table = None
            if kernel.traits.paged:
                table = read(features.block_table, ctypes.c_int32, q.shape[0] * features.max_pages)
                table = table.view(q.shape[0], -1).long()
                assert features.page_size == k.shape[1]
            for i, n in enumerate(used):
                k_i, v_i = (x[i] if table is None else x[table[i].clamp(0)].flatten(0, 1) for x in (k, v))
                k_i, v_i = k_i[None, :n], v_i[None, :n]
                one_lse = None if lse is None else lse[i : i + 1]
                cpu.attention(
                    kernel.config, q[i : i + 1], k_i, v_i, o[i : i + 1], one_lse, softmax_scale, **options
                )
            return
        if not features.cu_seqlens_q:
            cpu.attention(kernel.config, q, k, v, o, lse, softmax_scale, **options)
            return
        ends_q, ends_k = (
            read(address, ctypes.c_int32, q.shape[0] + 1).tolist()
            for address in (features.cu_seqlens_q, features.cu_seqlens_k)
        )
        for i in range(q.shape[0]):
            q_i, o_i = (packed_rows(x, ends_q[i], ends_q[i + 1]) for x in (q, o))
            k_i, v_i = (packed_rows(x, ends_k[i], ends_k[i + 1]) for x in (k, v))
            lse_i = lse.view(-1).as_strided(
                (1, q.shape[2], ends_q[i + 1] - ends_q[i]), (0, features.total_q, 1), ends_q[i]
            )
            cpu.attention(kernel.config, q_i, k_i, v_i, o_i, lse_i, softmax_scale, **options)


def read(address, kind, n):
    return torch.tensor((kind * n).from_address(address)[:])


def packed_rows(x, begin, end):
    """Rows of a packed tensor, of which x is an expanded view of the first ones."""
    return x.as_strided(
        (1, end - begin, *x.shape[2:]), (0, *x.stride()[1:]), x.storage_offset() + begin * x.stride(1)
    )


@pytest.fixture
def cuda(monkeypatch):
    acted = ActedCuda()
    acted.build = lambda kernels, targets: acted.built.update(kernels)
    monkeypatch.setattr(choices, "backend", lambda name: acted)
    monkeypatch.setattr(cuda_choice, "backend", lambda name: acted)
    monkeypatch.setattr(cuda_backend, "forward", lambda *given, **_: acted.forward(*given))
    monkeypatch.setattr(build, "build_kernels", acted.build)
    monkeypatch.setattr(availability, "backend", lambda name: acted)
    generation.begin()
    yield acted
    generation.begin()


@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (40, 40), (72, 72), (128, 8), (8, 128)])
@pytest.mark.parametrize("scale", [0.1, 0.0, -0.1])
def test_tensors_are_made_to_fit_the_kernel(cuda, d, d_v, scale):
    q, k, v = generate_qkv(QKVConfig(2, 50, 4, d, DType.FP16, seq_len_k=70, n_heads_kv=2, d_head_v=d_v))
    k = k.transpose(2, 3).contiguous().transpose(2, 3)  # last stride is not 1
    v = torch.cat((v.new_zeros(1), v.flatten()))[1:].view(v.shape)  # not at a multiple of 16 bytes
    problem = AttentionProblem(DType.FP16, 2, 50, 70, 4, 2, d, d_v, right=0)
    choice = choices.choose(problem, CUDA, None)
    out = torch.full((2, 50, 4, d_v), math.nan, dtype=torch.float16)
    lse = torch.empty(2, 4, 50)
    run(choice, problem, Call(q, k, v, out, lse, CAUSAL, Scores(scale)))
    expected, expected_lse = reference(q, k, v, causal=True, softmax_scale=scale)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6)


@pytest.fixture
def all_features(monkeypatch):
    """Families that have every feature."""

    def acted(kernel):
        return dataclasses.replace(direction_of(kernel), traits=ALL_TRAITS)

    monkeypatch.setattr("flash_helpers.select.candidates.direction_of", acted)


@pytest.mark.parametrize("d", [64, 40])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (9, 4)},
        {"window": (9, 0)},
        {"softcap": 2.0, "causal": True},
        {"sinks": torch.tensor([0.0, 1, -1, 2])},
    ],
    ids=str,
)
def test_features_reach_the_kernel(cuda, all_features, d, options):
    q, k, v = generate_qkv(QKVConfig(2, 50, 4, d, DType.FP16, seq_len_k=70, n_heads_kv=2))
    right = 0 if options.get("causal") else options.get("window", (None, None))[1]
    softcap, sinks = options.get("softcap", 0.0), options.get("sinks")
    problem = AttentionProblem(
        DType.FP16, 2, 50, 70, 4, 2, d, d, options.get("window", (None, None))[0], right,
        softcap > 0, sinks is not None,
    )  # fmt: skip
    out, lse = torch.full_like(q, math.nan), torch.empty(2, 4, 50)
    mask = Mask(options.get("window", (None, None))[0], right)
    run(
        choices.choose(problem, CUDA, None),
        problem,
        Call(q, k, v, out, lse, mask, Scores(0.1, softcap, sinks)),
    )
    expected, expected_lse = reference(q, k, v, softmax_scale=0.1, **options)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6)
    assert cuda.launches[-1].traits.causal == bool(options.get("causal"))


def test_split_keys_get_a_workspace(cuda):
    q, k, v = generate_qkv(QKVConfig(1, 1, 4, 64, DType.FP16, seq_len_k=3000, n_heads_kv=2))
    problem = AttentionProblem(DType.FP16, 1, 1, 3000, 4, 2, 64, 64)
    choice = choices.choose(problem, CUDA, None)
    assert choice.n_splits > 1
    out, lse = torch.full_like(q, math.nan), torch.empty(1, 4, 1)
    run(choice, problem, Call(q, k, v, out, lse, Mask(), Scores(0.1)))
    expected, expected_lse = reference(q, k, v, softmax_scale=0.1)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_one_query_with_a_window_reads_its_keys_alone(cuda, sinks):
    q, k, v = generate_qkv(QKVConfig(3, 1, 4, 64, DType.FP16, seq_len_k=300, n_heads_kv=2))
    problem = AttentionProblem(DType.FP16, 3, 1, 300, 4, 2, 64, 64, left=40, sinks=sinks is not None)
    out = torch.full_like(q, math.nan)
    call = Call(q, k, v, out, None, Mask(left=40), Scores(0.1, sinks=sinks))
    run(choices.choose(problem, CUDA, None), problem, call)
    expected, _ = reference(q, k, v, softmax_scale=0.1, window=(40, None), sinks=sinks)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    assert not cuda.launches[-1].traits.window


@pytest.mark.parametrize("d", [64, 40])
def test_packed_sequences_reach_the_kernel(cuda, all_features, d):
    lengths_q, lengths_k = (5, 30, 0, 17), (9, 0, 12, 40)
    q = ramp((sum(lengths_q), 4, d), 5)
    k, v = ramp((sum(lengths_k), 2, d), 7), ramp((sum(lengths_k), 2, d), 11)
    offsets = [torch.tensor((0, *itertools.accumulate(n)), dtype=torch.int32) for n in (lengths_q, lengths_k)]
    problem = AttentionProblem(DType.FP16, 4, 30, 40, 4, 2, d, d, right=0, varlen=True)
    out, lse = torch.full_like(q, math.nan), torch.empty(4, sum(lengths_q))
    choice = choices.choose(problem, CUDA, None)
    run(choice, problem, Call(q, k, v, out, lse, CAUSAL, Scores(0.1), Packed(*offsets, 30, 40)))
    alone = [
        reference(*(x[None] for x in parts), causal=True, softmax_scale=0.1)
        for parts in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    ]
    torch.testing.assert_close(out.double(), torch.cat([o[0] for o, _ in alone]), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), torch.cat([x[0] for _, x in alone], 1), atol=1e-3, rtol=2e-6)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("seq_len_q", [1, 3])
def test_a_cache_reaches_the_kernel(cuda, seq_len_q, paged):
    lengths, page_size, max_pages = (40, 1, 0, 23), 16, 3
    q = ramp((4, seq_len_q, 4, 64), 5)
    k, v = ramp((4, page_size * max_pages, 2, 64), 7), ramp((4, page_size * max_pages, 2, 64), 11)
    table, pages = None, (k, v)
    if paged:  # pages from the last to the first, and of what is not used no page at all
        table = torch.arange(11, -1, -1, dtype=torch.int32).view(4, max_pages)
        pages = tuple(x.view(-1, page_size, 2, 64).flip(0) for x in (k, v))
        table[1:, 2] = -1
    problem = AttentionProblem(
        DType.FP16, 4, seq_len_q, k.shape[1], 4, 2, 64, 64, varlen=True, cached=True, paged=paged
    )
    out, lse = torch.full_like(q, math.nan), torch.empty(4, 4, seq_len_q)
    choice = choices.choose(problem, CUDA, None)
    assert choice.kernel.traits.paged == paged
    cache = Cached(torch.tensor(lengths, dtype=torch.int32), table)
    run(choice, problem, Call(q, *pages, out, lse, Mask(), Scores(0.1), cache))
    for i, n in enumerate(lengths):
        one = slice(i, i + 1)
        expected, expected_lse = reference(q[one], k[one, :n], v[one, :n], softmax_scale=0.1)
        torch.testing.assert_close(out[one].double(), expected, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse[one].double(), expected_lse, atol=1e-3, rtol=2e-6)


def test_fitting_tensors_are_not_copied(cuda):
    q, k, v = generate_qkv(QKVConfig(2, 50, 4, 64, DType.FP16))
    seen = []
    cuda.forward = lambda kernel, *tensors_and_scale: seen.extend(tensors_and_scale)
    out = torch.empty_like(q)
    packed = torch.stack((q, k, v), 2).unbind(2)
    cuda_backend.run(Call(*packed, out, None, Mask(), Scores(0.1)), choices.choose(PROBLEM, CUDA, None))
    assert [x.data_ptr() for x in seen[:4]] == [x.data_ptr() for x in (*packed, out)]


def test_no_keys():
    out, lse = torch.empty(1, 3, 2, 8), torch.empty(1, 2, 3)
    fill_without_keys(out, lse, None)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    fill_without_keys(out, lse, torch.tensor([1.0, 2.0]))
    assert lse[0].tolist() == [[1.0] * 3, [2.0] * 3]


def test_prepare_builds_each_kernel_once(cuda, monkeypatch):
    builds = []
    monkeypatch.setattr(
        build,
        "build_kernels",
        lambda kernels, targets: (builds.append((list(kernels), targets)), cuda.built.update(kernels)),
    )
    causal = AttentionProblem(DType.FP16, 2, 100, 90, 4, 2, 64, 64, right=0)
    prepare([PROBLEM, PROBLEM, causal], CUDA)
    prepare([PROBLEM], CUDA)
    ((kernels, targets),) = builds
    assert len(kernels) == 2
    assert targets == [90]


@pytest.mark.parametrize(
    ("problems", "error", "message"),
    [
        (PROBLEM, TypeError, "pass \\[problem\\]"),
        ([PROBLEM, "bf16 s512"], TypeError, "'bf16 s512'; it must be an AttentionProblem"),
        ([dataclasses.replace(PROBLEM, dtype="fp16")], TypeError, "dtype is 'fp16'"),
        ([dataclasses.replace(PROBLEM, batch=-1)], ValueError, "batch is -1"),
        ([dataclasses.replace(PROBLEM, seq_len_k=8.0)], TypeError, "seq_len_k is 8.0"),
        ([dataclasses.replace(PROBLEM, d_head=63)], ValueError, "head size of q and k is 63"),
        (None, TypeError, "problems is None; it must be a list"),
        ([dataclasses.replace(PROBLEM, d_head="64")], TypeError, "d_head is '64'"),
        ([dataclasses.replace(PROBLEM, left=1.0)], TypeError, "left limit is 1.0"),
        ([dataclasses.replace(PROBLEM, softcap=3.0)], TypeError, "softcap is 3.0; it must be True or False"),
        ([dataclasses.replace(PROBLEM, paged=True)], ValueError, "what is paged is cached"),
        ([dataclasses.replace(PROBLEM, n_heads=5, n_heads_kv=2)], ValueError, "5 heads and k and v have 2"),
    ],
)
def test_prepare_refuses_what_no_tensors_have(problems, error, message):
    with pytest.raises(error, match=message):
        prepare(problems, "cpu")


@pytest.mark.parametrize(
    ("sizes", "options", "limits"),
    [
        ((1, 4096), {"causal": True}, {"right": 0}),
        ((64, 64), {"causal": True, "window": (64, 0)}, {"left": 64, "right": 0}),
        ((64, 80), {"window": (79, 63)}, {"left": 79, "right": 63}),
        ((64, 80), {"window": (78, 62)}, {"left": 78, "right": 62}),
    ],
)
def test_prepared_is_what_runs_where_limits_hide_nothing(cuda, sizes, options, limits):
    """A single causal query needs no mask, for instance."""
    queries, keys = sizes
    problem = AttentionProblem(DType.FP16, 1, queries, keys, 4, 4, 64, 64, **limits)
    q, k = torch.empty(1, queries, 4, 64).half(), torch.empty(1, keys, 4, 64).half()
    (prepared,) = prepare([problem], CUDA)
    assert prepared.kernel == explain_choice(q, k, k, facts=H100, **options).kernel
    assert cuda.loaded == [prepared.kernel]


@pytest.mark.parametrize("device", ["mps", "bogus", None, 3])
def test_prepare_refuses_other_devices(device):
    with pytest.raises(ValueError, match="it must be 'cuda', 'cuda:N' or 'cpu'"):
        prepare([PROBLEM], device)


def test_explanations_are_asked_for_with_the_types_of_attention():
    q = torch.zeros(1, 8, 2, 64, dtype=torch.float16)
    with pytest.raises(TypeError, match="causal is 'False'"):
        explain_choice(q, q, q, causal="False")
    with pytest.raises(TypeError, match="facts is 'H100'"):
        explain_choice(q, q, q, facts="H100")


def test_explained_with_all_that_attention_takes():
    q = torch.zeros(1, 8, 2, 64, dtype=torch.float16)
    options = {"causal": True, "softmax_scale": 0.1, "window": (5, None), "softcap": 3.0}
    options |= {"sinks": torch.zeros(2), "return_lse": True, "out": torch.empty_like(q), "backend": "cpu"}
    attention(q, q, q, **options)
    assert explain_choice(q, q, q, **options).kernel == last_kernel()
    for wrong in ({"softmax_scale": math.nan}, {"backend": "cuda"}, {"out": q[:, 1:]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            explain_choice(q, q, q, **options | wrong)


def test_explained_without_memory():
    """For a GPU that is not there the tensors need not be there either."""
    q = torch.empty(1, 65536, 16, 128, dtype=torch.float16, device="meta")
    choice = explain_choice(q, q, q, facts=H100)
    assert choice.kernel == select(problem_of(q, q, q), H100).kernel
    with pytest.raises(ValueError, match="q is a meta tensor, which says no GPU"):
        explain_choice(q, q, q)


def test_prepare_on_the_cpu_builds_nothing():
    (choice,) = prepare([PROBLEM], "cpu")
    assert "CPU" in choice.reason


def test_grid_limit_of_the_chosen_kernel(cuda):
    huge = AttentionProblem(DType.FP16, 1 << 16, 64, 64, 1 << 16, 1 << 16, 64, 64)
    with pytest.raises(ValueError, match="thread blocks"):
        choices.choose(huge, CUDA, None)


def test_choices_are_remembered_by_shape(monkeypatch):
    calls = []
    real = choices._choice
    monkeypatch.setattr(choices, "_choice", lambda *a, **kw: (calls.append(a), real(*a, **kw))[1])
    shape = (1, 23, 2, 24)
    for _ in range(3):
        q, k, v = (ramp(shape, a) for a in (5, 7, 11))
        attention(q, k, v, softmax_scale=0.1)
    assert len(calls) == 1
    attention(q, k, v, causal=True)
    assert len(calls) == 2


def test_sinks_are_checked_on_every_call():
    q = torch.zeros(1, 5, 2, 8, dtype=torch.float16)
    attention(q, q, q, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="sinks"):
        attention(q, q, q, sinks=torch.zeros(3))


def test_last_kernel_of_packed_sequences():
    q = torch.zeros(5, 2, 8, dtype=torch.float16)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    attention(*(torch.zeros(1, 5, 2, 16, dtype=torch.float16),) * 3)
    attention_varlen(q, q, q, offsets, offsets, 5, 5, causal=True)
    assert last_kernel().config.d_head == 64  # the smallest of the family that holds 8
    assert last_kernel().traits.causal


def test_explained_for_a_device_that_is_not_there():
    q, k, v = generate_qkv(QKVConfig(1, 100, 2, 64, DType.FP16))
    wide = generate_qkv(QKVConfig(1, 100, 2, 256, DType.FP16))
    assert explain_choice(*wide, softcap=3.0, facts=H100).kernel.traits.softcap
    assert explain_choice(*wide, softcap=3.0, facts=device_facts("A100")).kernel.config.d_head == 256
    with pytest.raises(NoKernelError, match=r"compute capability 7\.5"):
        explain_choice(*wide, facts=dataclasses.replace(H100, capability=(7, 5)))
    choice = explain_choice(q, k, v, facts=H100)
    assert (
        explain_choice(q, k, v, facts=H100, config=choice.rejected[0].kernel.config).kernel
        == choice.rejected[0].kernel
    )


def test_explained_for_a_device_that_is_not_there_as_its_calls_choose(monkeypatch, tmp_path):
    """By the table that ships: on the card itself, ``attention`` chooses by it."""
    monkeypatch.setenv("FLASH_ATTENTION_TUNING_DB", str(tmp_path / "none.sqlite3"))
    q = torch.empty(4, 4096, 16, 128, dtype=torch.bfloat16)
    choice = explain_choice(q, q, q, facts=H100)
    assert "from the shipped table of NVIDIA H100 80GB HBM3" in choice.reason
    assert (
        choice.kernel
        == select(
            problem_of(q, q, q),
            H100,
            TuningResults(tmp_path / "none.sqlite3"),
        ).kernel
    )


@pytest.mark.parametrize("limit", [0, 5, 2**30 - 1, 2**30, 2**32 + 3, None, -1, -(2**30), -(2**32)])
def test_a_side_of_the_window_fits_the_kernels_numbers(limit: int | None) -> None:
    # Packed sequences may be announced as longer than any is: max_seqlen_k only bounds them.
    left, _ = visible_limits(False, (limit, None), 2**40, 2**40)
    side = backend("cuda").window_side(left)
    assert side == (2**30 - 1 if limit is None else max(-(2**30), min(limit, 2**30 - 1)))
