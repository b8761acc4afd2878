"""Packed queries over a cache on a GPU: chunks, decoding and drafts in one launch, planned on the device."""

from __future__ import annotations

import random

import pytest
import torch
from graph_kernels import launched
from packed_cache_calls import PackedCall

from flash_attention import attention_varlen, last_kernel
from flash_helpers import build
from flash_helpers.kernels.families import FAMILIES, family_of

MIXED = (130, 1, 0, 1, 3, 65, 1, 1), (300, 900, 40, 1, 70, 65, 0, 2111)
DECODING = (1, 1, 1, 1, 1), (5000, 17, 0, 300, 1281)
DRAFTS = (4, 1, 8, 2, 0, 5), (700, 3000, 8, 33, 10, 4)


def _call(lengths: tuple[tuple[int, ...], tuple[int, ...]], **changes: object) -> PackedCall:
    return PackedCall(*lengths, **changes)  # type: ignore[arg-type]


OPTIONS: dict[str, dict[str, object]] = {
    "everything": {},
    "window": {"window": (100, 0)},
    "both_sides": {"window": (60, 30)},
    "softcap": {"softcap": 20.0, "causal": True},
    "scale": {"softmax_scale": -0.3, "causal": True},
}
FLOAT32 = {"causal": True, "out_dtype": torch.float32}
CAUSAL = {"causal": True}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """The kernels of the calls below, built in parallel."""
    calls = []
    for page_size in (16, 5):
        for lengths in (MIXED, DRAFTS):
            calls += [
                _call(lengths, page_size=page_size, d=d, options=CAUSAL) for d in (64, 128, 256, 40, 96)
            ]
            for sinks in (False, True):
                calls += [
                    _call(lengths, page_size=page_size, sinks=sinks, options=options)
                    for options in (*OPTIONS.values(), FLOAT32)
                ]
            calls += [
                _call(lengths, page_size=page_size, heads=heads, options=CAUSAL)
                for heads in ((96, 1), (28, 4))
            ]
    calls += [
        _call(lengths, page_size=page_size, options=options)
        for lengths in (MIXED, DECODING, DRAFTS) for page_size in (16, 5, 0, -1) for options in (CAUSAL, {})
    ]  # fmt: skip
    kernels = {call.kernel() for call in calls}
    major, minor = torch.cuda.get_device_capability()
    for family in FAMILIES:
        own = [kernel for kernel in kernels if family_of(kernel) is family]
        if own:
            build.build_kernels(own, [10 * major + minor])


@pytest.mark.parametrize("page_size", [16, 32, 48, 64, 80, 128, 256, 5, 1, 0, -1])
@pytest.mark.parametrize("lengths", [MIXED, DECODING, DRAFTS], ids=["mixed", "decoding", "drafts"])
def test_pages_caches_and_packed_keys(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], page_size: int
) -> None:
    call = _call(lengths, page_size=page_size, options=CAUSAL)
    call.check()
    call.check()  # a remembered call


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (28, 4), (64, 1), (6, 2), (96, 1)], ids=str)
@pytest.mark.parametrize("page_size", [16, 5], ids=["tma", "cp_async"])
def test_groups_of_heads(heads: tuple[int, int], page_size: int) -> None:
    for lengths in (MIXED, DRAFTS):
        _call(lengths, heads=heads, page_size=page_size, options=CAUSAL).check()


@pytest.mark.parametrize("page_size", [64, 5], ids=["tma", "cp_async"])
@pytest.mark.parametrize("d", [128, 256, 40, 96])
def test_head_sizes(d: int, page_size: int) -> None:
    for lengths in (MIXED, DRAFTS):
        _call(lengths, d=d, page_size=page_size, options=CAUSAL).check()


@pytest.mark.parametrize("page_size", [16, 5], ids=["tma", "cp_async"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, object], sinks: bool, page_size: int) -> None:
    for lengths in (MIXED, DRAFTS):
        _call(lengths, sinks=sinks, page_size=page_size, options=options).check()


@pytest.mark.parametrize("page_size", [16, 5], ids=["tma", "cp_async"])
def test_queries_that_do_not_count(page_size: int) -> None:
    used = (100, 1, 0, 0, 2, 65, 7, 1)
    for sinks in (False, True):
        _call(MIXED, used=used, sinks=sinks, page_size=page_size, options=CAUSAL).check()
    _call(MIXED, used=(3, 1, 0, 1, 3, 1, 1, 1), page_size=page_size, options=CAUSAL).check()


@pytest.mark.parametrize("page_size", [16, 5], ids=["tma", "cp_async"])
def test_float32_outputs(page_size: int) -> None:
    for lengths in (MIXED, DRAFTS):
        _call(lengths, page_size=page_size, options=FLOAT32).check()


@pytest.mark.parametrize("d", [64, 128, 96, 256])
@pytest.mark.parametrize("n_sms", [1, 2, 5])
def test_few_blocks_go_from_chunks_to_decoding_and_back(n_sms: int, d: int) -> None:
    # A warpgroup without rows in one item has some in the next, and the other way round.
    queries, keys = (1, 130, 16, 17, 1, 40, 1, 0, 33, 32, 1), (900, 700, 65, 40, 2111, 40, 5, 0, 640, 33, 1)
    for options in (CAUSAL, {}):
        call = _call((queries, keys), d=d, options={**options, "n_sms": n_sms})
        call.check()
        call.check()


@pytest.mark.parametrize("page_size", [16, 5], ids=["tma", "cp_async"])
@pytest.mark.parametrize("n_splits", [1, 2, 7, 256])
def test_parts_that_the_caller_wants(n_splits: int, page_size: int) -> None:
    for lengths in (MIXED, DRAFTS):
        _call(lengths, page_size=page_size, options={**CAUSAL, "n_splits": n_splits}).check()


def test_both_families_run() -> None:
    call = _call(MIXED, page_size=16, options=CAUSAL)
    call.run()
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert family_of(last_kernel()).name == ("hopper" if on_hopper else "ampere")
    _call(MIXED, page_size=5, options=CAUSAL).run()
    assert family_of(last_kernel()).name == "ampere"


@pytest.mark.parametrize("page_size", [16, 5], ids=["tma", "cp_async"])
@pytest.mark.parametrize("longest_q", [1, 300], ids=["decoding", "mixed"])
def test_one_graph_serves_all_lengths(longest_q: int, page_size: int) -> None:
    random.seed(longest_q)
    batch, total, capacity = 12, 12 if longest_q == 1 else 340, 6000
    first = (1,) * batch if longest_q == 1 else (20,) * batch
    call = PackedCall(
        first, (capacity,) * batch, page_size, padding=total - sum(first), capacity=capacity,
        longest_q=longest_q, options=CAUSAL,
    )  # fmt: skip
    args, options = call.arguments()
    out = torch.empty(*call.q.shape[:-1], call.v.shape[-1], dtype=call.dtype, device="cuda")
    attention_varlen(*args, **options, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = attention_varlen(*args, **options, out=out)
    for _ in range(12):
        if longest_q == 1:
            queries = tuple(random.choice((0, 1)) for _ in range(batch))
        else:
            left, queries = total, ()
            for _ in range(batch):
                n = min(left, random.choice((0, 1, 1, 1, 4, 17, longest_q)))
                queries += (n,)
                left -= n
        keys = tuple(random.choice((0, 1, 130, 700, random.randint(0, capacity), capacity)) for _ in queries)
        call.queries, call.keys = queries, keys
        call.cu_seqlens_q.copy_(call.ends(queries))
        call.seqused_k.copy_(torch.tensor(keys, dtype=torch.int32))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        call.check((out, lse))


@pytest.mark.parametrize("page_size", [16, 5], ids=["tma", "cp_async"])
def test_equal_calls_give_equal_bits_whatever_the_others_hold(page_size: int) -> None:
    for lengths in (MIXED, DECODING):
        call = _call(lengths, page_size=page_size, capacity=6000, options=CAUSAL)
        first = [x.clone() for x in call.run()]
        for _ in range(5):
            assert all(map(torch.equal, call.run(), first))
        # Other lengths of the keys of all sequences but one, in pages of which NaN is no number.
        call.k.nan_to_num_(0.5)
        call.v.nan_to_num_(0.5)
        for one in range(len(call.keys)):
            others = torch.randint(0, 6000, (len(call.keys),), dtype=torch.int32)
            others[one] = call.keys[one]
            call.seqused_k.copy_(others)
            out, lse = call.run()
            rows = slice(sum(call.queries[:one]), sum(call.queries[: one + 1]))
            assert torch.equal(out[rows], first[0][rows])
            assert torch.equal(lse[:, rows], first[1][:, rows])


def test_a_call_launches_two_kernels() -> None:
    call = _call(DECODING, page_size=16, capacity=6000)
    call.run()
    args, options = call.arguments()
    names = [name for name, _ in launched(lambda: attention_varlen(*args, **options))]
    assert len(names) == 2
    assert "planned_combine" in names[1]


@pytest.mark.parametrize("seed", range(12))
def test_random_calls(seed: int) -> None:
    make = random.Random(seed)
    batch = make.choice((1, 3, 33, 70))
    longest = make.choice((1, 4, 200))
    queries = tuple(make.choice((0, 1, 1, 1, make.randint(0, longest))) for _ in range(batch))
    if not max(queries):
        queries = (1, *queries[1:])
    keys = tuple(make.choice((0, 1, make.randint(0, 200), make.randint(0, 4000))) for _ in range(batch))
    used = None if make.random() < 0.5 else tuple(make.randint(0, n) for n in queries)
    PackedCall(
        queries, keys, make.choice((16, 5, 32, 0)), used, heads=make.choice(((8, 2), (4, 4), (6, 1))),
        sinks=make.random() < 0.3, seed=seed, options={"causal": make.random() < 0.6},
    ).check()  # fmt: skip
