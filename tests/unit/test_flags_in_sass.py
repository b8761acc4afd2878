"""Every flag of an Ampere configuration does what it says: seen in the machine code of small kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, groupby

import pytest

from flash_helpers.build import BuildResult, KernelCache, build_library
from flash_helpers.build.main_loop import main_loop
from flash_helpers.build.sass import Instruction, disassemble, find_tool, parse_functions
from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    ForwardKernel,
    ForwardTraits,
    SoftmaxReference,
    choose_ampere_kernel,
    parse_kernel_name_into_config,
)
from flash_helpers.model.bank_conflicts import shared_accesses

TARGET = 80  # of the small kernels
FAST_TARGET = 90
# One row tile a warp, 4 steps along d_head, 4 key tiles of which each is one ldmatrix a step.
HELD = FlashForwardKernelConfig(DType.FP16, 64, 64, 64, 4, True, True, True, 0, 2, 2, False, True)
WHOLE = replace(HELD, K_mma_load_K_tiles=0, V_mma_load_K_tiles=0)
BUFFERED = replace(HELD, mma_double_buffer_loads=True)
STREAMED = replace(HELD, Q_mma_load_K_tiles=2)
LAZY = replace(HELD, eager_load_blocks=False)
THROUGH_REGISTERS = replace(LAZY, async_copy=False)
PLAIN_SOFTMAX = replace(HELD, optimized_softmax=False)
SMALL = [HELD, WHOLE, BUFFERED, STREAMED, LAZY, THROUGH_REGISTERS, PLAIN_SOFTMAX]

# The chosen kernels, and how many instructions their steady loop may have for 256 products.
FAST = {
    choose_ampere_kernel(DType.BF16, 64, causal=False, seq_len=4096)[0]: 910,
    choose_ampere_kernel(DType.BF16, 128, causal=True, seq_len=1024)[0]: 630,
    choose_ampere_kernel(DType.BF16, 128, causal=False, seq_len=8192)[0]: 610,
    choose_ampere_kernel(DType.BF16, 128, causal=False, seq_len=1024, lse=True)[0]: 720,
    choose_ampere_kernel(DType.FP16, 128, causal=True, seq_len=1024)[0]: 1010,
    choose_ampere_kernel(DType.BF16, 256, causal=True, seq_len=4096)[0]: 620,
    choose_ampere_kernel(DType.BF16, 256, causal=True, seq_len=4096, lse=True)[0]: 650,
}

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        find_tool("cuobjdump") is None, reason="no cuobjdump: pip install -r requirements/cuda-compiler.txt"
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[BuildResult]:
    cache = KernelCache(tmp_path_factory.mktemp("cache"))
    small = [ForwardKernel(config) for config in SMALL]
    return [build_library(small, TARGET, cache=cache), build_library(list(FAST), FAST_TARGET, cache=cache)]


Loops = dict[ForwardKernel, list[Instruction]]


@pytest.fixture(scope="module")
def loops(built: list[BuildResult]) -> Loops:
    """The steady loop of each kernel."""
    found = {}
    code = "".join(disassemble(library.path) for library in built)
    for name, body in parse_functions(code).items():
        if "flash_forward_kernel" in name and body:
            config = parse_kernel_name_into_config(name)
            assert isinstance(config, FlashForwardKernelConfig)
            kernel = ForwardKernel(config, ForwardTraits(causal="13ForwardTraitsLb1E" in name))
            found[kernel] = main_loop(body, config.products_per_block)
    return found


def loop_of(loops: Loops, config: FlashForwardKernelConfig) -> list[Instruction]:
    loop = loops[ForwardKernel(config)]
    assert loop, config.short_form()
    return loop


def count(loop: list[Instruction], name: str) -> int:
    return sum(i.name == name for i in loop)


def runs(loop: list[Instruction]) -> list[tuple[str, int]]:
    """Fragment loads and products in their order: (``LDSM`` or ``HMMA``, how many in a row)."""
    names = [i.name for i in loop if i.name in ("LDSM", "HMMA")]
    return [(name, len(list(group))) for name, group in groupby(names)]


def loads_before_products(loop: list[Instruction]) -> list[int]:
    """How many fragments are loaded when the n-th product starts, for n = 0, 1, …"""
    names = [i.name for i in loop]
    loaded = list(accumulate(int(name == "LDSM") for name in names))
    return [n for n, name in zip(loaded, names, strict=True) if name == "HMMA"]


def test_async_copy_is_the_one_that_needs_no_registers(loops: Loops) -> None:
    for config in (HELD, LAZY):
        loop = loop_of(loops, config)
        # K and V: 64 rows of 128 bytes, 128 threads of 16 bytes
        assert (count(loop, "LDGSTS"), count(loop, "LDG"), count(loop, "STS")) == (8, 0, 0)
    loop = loop_of(loops, THROUGH_REGISTERS)
    assert (count(loop, "LDGSTS"), count(loop, "LDG"), count(loop, "STS")) == (0, 8, 8)


def test_eager_copies_start_behind_the_barrier_that_frees_their_place(loops: Loops) -> None:
    def before_first_barrier(config: FlashForwardKernelConfig) -> int:
        names = [i.name for i in loop_of(loops, config)]
        return names[: names.index("BAR")].count("LDGSTS")

    assert before_first_barrier(HELD) == 0
    assert before_first_barrier(LAZY) == 4  # K, which the barrier waits for


def test_zero_tiles_load_the_whole_block_before_its_products(loops: Loops) -> None:
    # K: 4 steps of 4 fragments, V the same; 8 products a step
    assert runs(loop_of(loops, WHOLE)) == [("LDSM", 16), ("HMMA", 32), ("LDSM", 16), ("HMMA", 32)]


def test_two_tiles_are_loaded_at_a_time(loops: Loops) -> None:
    assert runs(loop_of(loops, HELD)) == [("LDSM", 8), ("HMMA", 16)] * 4


def test_held_Q_is_not_loaded_again(loops: Loops) -> None:
    held, streamed = (count(loop_of(loops, config), "LDSM") for config in (HELD, STREAMED))
    assert (held, streamed) == (32, 32 + 4)  # Q: one fragment for each of 4 steps


def test_double_buffer_loads_the_next_tiles_during_the_products(loops: Loops) -> None:
    loaded = loads_before_products(loop_of(loops, BUFFERED))
    assert loaded[0] < 16 <= loaded[15]  # the second group comes during the first one's 16 products
    plain = loads_before_products(loop_of(loops, HELD))
    assert (plain[0], plain[15], plain[16]) == (8, 8, 16)


def test_optimized_softmax_scales_in_the_exponent(loops: Loops) -> None:
    # 32 scores a thread: scale, and the exponent's factor, are a multiplication each, or one FFMA together
    folded, plain = (loop_of(loops, config) for config in (HELD, PLAIN_SOFTMAX))
    assert count(folded, "FFMA") >= 32
    assert count(plain, "FFMA") < 32
    assert count(plain, "FMUL") >= count(folded, "FMUL") + 32


def test_swizzle_removes_bank_conflicts() -> None:
    assert {access.ways for access in shared_accesses(HELD)} == {1}
    assert max(access.ways for access in shared_accesses(replace(HELD, swizzled=False))) == 8


@pytest.mark.parametrize("kernel", FAST, ids=ForwardKernel.short_form)
def test_chosen_kernels_are_lean(built: list[BuildResult], loops: Loops, kernel: ForwardKernel) -> None:
    config = kernel.config
    assert isinstance(config, FlashForwardKernelConfig)
    (facts,) = (compiled for compiled in built[1].kernels if compiled.kernel == kernel)
    assert (facts.spill_bytes, facts.warnings) == (0, ())
    loop = loops[kernel]
    assert count(loop, "HMMA") == config.products_per_block
    assert count(loop, "LDL") + count(loop, "STL") == 0
    per_256 = len(loop) * 256 / config.products_per_block
    assert per_256 <= FAST[kernel], f"{per_256:.0f} instructions for 256 products"
    exponentials = config.rows_per_warp * config.B_c // config.warps_per_group // 32
    rescales = sum(i.opcode == "MUFU.EX2" for i in loop) - exponentials
    anchored = config.softmax_reference == SoftmaxReference.ANCHORED
    assert (rescales == 0) == anchored, "an anchored reference needs no exponential but P's"
    assert not (anchored and count(loop, "FMNMX")), "… and no maximum"
    # Of an anchored softmax only the row sums add, and pairs, which add up their halves of the scores.
    adds = config.paired_warps or not config.tensor_row_sums
    assert not anchored or (count(loop, "FADD") > 0) == adds
    barriers = sum(i.name == "BAR" for i in loop)
    assert barriers == (0 if config.mbarrier else 1) + (2 if config.paired_warps else 0)
