"""The timer and ``forward_timed`` against what is known: a sleep, the growth with length, the card's peak, a
profiler. To be run while nothing else uses the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from gpu_cases import CONFIG

from flash_attention import forward, forward_timed
from flash_helpers.benchmark.correctness import reference
from flash_helpers.benchmark.cuda_timer import CudaTimer
from flash_helpers.benchmark.matrix_rate import matrix_tflops
from flash_helpers.benchmark.timing import TimedCall, alternate
from flash_helpers.kernel_configs import FlashForwardKernelConfig
from flash_helpers.kernels.dtype import DType
from flash_helpers.problem import Problem

WIDE = FlashForwardKernelConfig(DType.FP16, 128, 64, 64, 4, True, True, True, 0, 2, 2, False, True)
LONG = Problem(DType.FP16, 1, 16, 8192, 128)
TINY = Problem(DType.FP16, 1, 1, 128, 64)
SLEEP_MS = 10.0
KERNEL_MODES = ("kernel", "cold", "graph")


def measure(call: Callable[[], object], mode: str = "kernel", rounds: int = 7) -> float:
    """Median milliseconds of a call."""
    timer, timed = CudaTimer(torch.device("cuda", torch.cuda.current_device())), TimedCall(call)
    timer.estimate(timed)
    samples, failures = alternate({"call": timed}, timer.measure(mode), rounds)
    assert not failures
    return statistics.median(samples["call"])


def forward_call(config: FlashForwardKernelConfig, problem: Problem) -> Callable[[], object]:
    q, k, v = problem.inputs(torch.device("cuda"))
    o = torch.empty_like(q)
    return lambda: forward(config, q, k, v, o)


def cycles_for(milliseconds: float) -> int:
    """What ``torch.cuda._sleep`` is to be given, found with the wall clock of long sleeps."""
    cycles = 200_000_000
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return int(cycles * milliseconds / (1e3 * (time.perf_counter() - begin)))


@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_a_sleep_of_10_ms_reads_10_ms(mode: str) -> None:
    cycles = cycles_for(SLEEP_MS)
    assert measure(lambda: torch.cuda._sleep(cycles), mode, rounds=3) == pytest.approx(SLEEP_MS, rel=0.05)


@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_twice_the_length_takes_four_times_as_long(mode: str) -> None:
    double = Problem(DType.FP16, 1, 16, 16384, 128)
    short, long = (measure(forward_call(WIDE, problem), mode) for problem in (LONG, double))
    assert 3.5 <= long / short <= 4.5


def test_the_rate_stays_below_the_matrix_units() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rate = LONG.flop() / measure(forward_call(WIDE, LONG)) / 1e9
    assert 0.05 * matrix_tflops(DType.FP16, device) < rate < matrix_tflops(DType.FP16, device)


def profiled_ms(call: Callable[[], object], calls: int = 20) -> float:
    """Median milliseconds of the attention kernel as the profiler sees it."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not kernels:
        pytest.skip("the profiler may not see kernels on this machine")
    times = [e.time_range.elapsed_us() for e in kernels if "flash_forward_kernel" in e.name]
    assert len(times) == calls, {e.name for e in kernels}
    return statistics.median(times) / 1e3


def test_a_tiny_call_reads_as_in_the_profiler() -> None:
    """In a graph: launches one by one are further apart than this kernel is long (5.2 against 3.4 us)."""
    call = forward_call(CONFIG, TINY)
    measured, profiled = measure(call, "graph"), profiled_ms(call)
    assert profiled / 1.5 <= measured <= 1.5 * profiled


def test_forward_timed_agrees_with_the_timer() -> None:
    q, k, v = LONG.inputs(torch.device("cuda"))
    single = statistics.median(forward_timed(WIDE, q, k, v)[1] for _ in range(5))
    assert single == pytest.approx(measure(forward_call(WIDE, LONG)), rel=0.15)


def test_forward_timed_grows_with_the_square_of_the_length() -> None:
    def milliseconds(seq_len: int) -> float:
        q, k, v = Problem(DType.FP16, 1, 2, seq_len, CONFIG.d_head).inputs(torch.device("cuda"))
        results = [forward_timed(CONFIG, q, k, v) for _ in range(5)]
        assert torch.equal(results[-1][0], forward(CONFIG, q, k, v))
        return statistics.median(time for _, time in results)

    # 2 heads and few blocks leave most SMs idle, so that only the ratio of two long runs is sharp
    assert 3 < milliseconds(32768) / milliseconds(16384) < 5
    assert milliseconds(128) < 0.05, "the host's own time is in the measured time"


def test_forward_timed_leaves_out_what_the_stream_did_before() -> None:
    q, k, v = Problem(DType.FP16, 1, 2, 2048, CONFIG.d_head).inputs(torch.device("cuda"))
    cycles = cycles_for(SLEEP_MS)
    _, here = forward_timed(CONFIG, q, k, v)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(cycles)
        _, there = forward_timed(CONFIG, q, k, v)
    assert there < 5 * here + 0.1


def test_on_a_side_stream() -> None:
    cycles = cycles_for(SLEEP_MS)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert measure(lambda: torch.cuda._sleep(cycles), rounds=3) == pytest.approx(SLEEP_MS, rel=0.05)
        q, k, v = TINY.inputs(torch.device("cuda"))
        o, milliseconds = forward_timed(CONFIG, q, k, v)
        assert milliseconds > 0
        torch.testing.assert_close(o.float(), reference(q, k, v), atol=4e-3, rtol=4e-3)


def test_work_on_another_stream_does_not_count_as_done() -> None:
    """A timer that did not wait for the stream of the call would read next to nothing."""
    cycles = cycles_for(SLEEP_MS)
    side = torch.cuda.Stream()

    def call() -> None:
        with torch.cuda.stream(side):
            torch.cuda._sleep(cycles)
        torch.cuda.current_stream().wait_stream(side)

    assert measure(call, rounds=3) == pytest.approx(SLEEP_MS, rel=0.05)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_on_a_second_gpu() -> None:
    device = torch.device("cuda", 1)
    timer = CudaTimer(device)
    q, k, v = TINY.inputs(device)
    timed = TimedCall(lambda: forward(CONFIG, q, k, v))
    timer.estimate(timed)
    elsewhere = timer.measure("kernel")(timed)
    assert elsewhere == pytest.approx(measure(forward_call(CONFIG, TINY)), rel=0.5)
