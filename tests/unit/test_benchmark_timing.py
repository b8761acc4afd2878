"""The timing method on simulated clocks: what is counted, what is not, in which order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flash_helpers.benchmark import cuda_timer, host_time
from flash_helpers.benchmark.cuda_timer import CudaTimer
from flash_helpers.benchmark.timing import CpuTimer, TimedCall, Timing, alternate, repeats_for


class SimulatedCuda:
    """A host clock and a GPU that works off one queue; stands for ``torch`` and ``time`` in the timer.

    A launch costs the host ``launch_seconds``; the GPU starts it when it is enqueued and all before is done.
    """

    def __init__(self, launch_seconds: float = 4e-6, cycles_per_second: float = 1e9) -> None:
        self.host = 0.0
        self.gpu = 0.0
        self.launch_seconds = launch_seconds
        self.cycles_per_second = cycles_per_second
        self.sleeps: list[float] = []
        cuda = self.cuda = SimpleNamespace()
        cuda.get_device_properties = lambda device: SimpleNamespace(
            clock_rate=cycles_per_second / 1e3, L2_cache_size=1 << 20
        )
        cuda.device = lambda device: torch.no_grad()  # any context manager
        cuda.synchronize = self.synchronize
        cuda.current_stream = lambda: SimpleNamespace(synchronize=self.synchronize)
        cuda._sleep = self.sleep
        cuda.Event = lambda enable_timing=False: SimulatedEvent(self)
        self.int32 = torch.int32

    def zeros(self, *args: object, **kwargs: object) -> SimpleNamespace:
        """A buffer whose reading takes 1 ms, its overwriting 2 ms."""
        return SimpleNamespace(sum=lambda: self.launch(1e-3), zero_=lambda: self.launch(2e-3))

    def launch(self, seconds: float) -> None:
        self.host += self.launch_seconds
        self.gpu = max(self.gpu, self.host) + seconds

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles / self.cycles_per_second)
        self.launch(cycles / self.cycles_per_second)

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)

    def perf_counter(self) -> float:
        return self.host


class SimulatedEvent:
    def __init__(self, machine: SimulatedCuda) -> None:
        self.machine = machine
        self.at = 0.0

    def record(self) -> None:
        self.at = self.machine.gpu = max(self.machine.gpu, self.machine.host)

    def query(self) -> bool:
        return self.at <= self.machine.host

    def synchronize(self) -> None:
        self.machine.host = max(self.machine.host, self.at)

    def elapsed_time(self, end: SimulatedEvent) -> float:
        assert end.at <= self.machine.host, "an event was read before it happened"
        return (end.at - self.at) * 1e3


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    simulated = SimulatedCuda()
    monkeypatch.setattr(cuda_timer, "torch", simulated)
    monkeypatch.setattr(cuda_timer, "time", simulated)
    return simulated


def measured(machine: SimulatedCuda, mode: str, seconds: float) -> tuple[float, TimedCall]:
    timer = CudaTimer(torch.device("cuda", 0))
    timed = TimedCall(lambda: machine.launch(seconds))
    timer.estimate(timed)
    return timer.measure(mode)(timed), timed


@pytest.mark.parametrize("seconds", [2e-6, 1e-4, 10e-3])
@pytest.mark.parametrize("mode", ["kernel", "cold", "dirty"])
def test_kernel_time_is_the_gpus_alone(machine: SimulatedCuda, mode: str, seconds: float) -> None:
    """Neither launches, nor the sleep, nor the filling of the cache are counted."""
    milliseconds, timed = measured(machine, mode, seconds)
    assert milliseconds == pytest.approx(seconds * 1e3, rel=1e-6)
    assert timed.launch_hidden


def test_call_time_includes_the_host(machine: SimulatedCuda) -> None:
    machine.launch_seconds = 50e-6
    milliseconds, _ = measured(machine, "call", 2e-6)
    assert milliseconds == pytest.approx(50e-3, rel=0.1)


def test_host_time_excludes_the_gpu(machine: SimulatedCuda) -> None:
    milliseconds, _ = measured(machine, "host", 1e-3)
    assert milliseconds == pytest.approx(4e-3, rel=1e-6)


def test_a_launch_slower_than_estimated_gets_a_longer_sleep(machine: SimulatedCuda) -> None:
    timer = CudaTimer(torch.device("cuda", 0))
    timed = TimedCall(lambda: machine.launch(1e-6), repeats=10, host_seconds=4e-6)
    machine.launch_seconds = 20e-6
    assert timer.measure("kernel")(timed) == pytest.approx(1e-3, rel=1e-6)
    assert timed.launch_hidden
    assert len(machine.sleeps) > 1
    assert machine.sleeps == sorted(machine.sleeps)


def test_a_call_that_waits_for_the_gpu_is_reported(machine: SimulatedCuda) -> None:
    def waiting() -> None:
        machine.launch(1e-6)
        machine.synchronize()

    timer = CudaTimer(torch.device("cuda", 0))
    timed = TimedCall(waiting)
    timer.estimate(timed)
    timer.measure("kernel")(timed)
    assert not timed.launch_hidden


def test_unknown_mode_names_the_known_ones(machine: SimulatedCuda) -> None:
    with pytest.raises(ValueError, match="kernel, cold, dirty, graph, call, host"):
        CudaTimer(torch.device("cuda", 0)).measure("warm")
    with pytest.raises(ValueError, match="kernel, call"):
        CpuTimer().measure("graph")


def test_rounds_measure_each_call_once_in_changing_order() -> None:
    seen: list[str] = []
    calls = {name: TimedCall(lambda name=name: name) for name in "abcde"}
    samples, failures = alternate(calls, lambda t: float(seen.append(t.call()) or 1.0), rounds=20)
    rounds = [seen[i : i + 5] for i in range(0, len(seen), 5)]
    assert not failures
    assert all(sorted(r) == list("abcde") for r in rounds)
    assert len({tuple(r) for r in rounds}) > 10
    assert all(len(values) == 20 for values in samples.values())


def test_a_drifting_clock_hits_all_calls_alike() -> None:
    """Each measurement is 0.1 % slower than the one before: two equal calls still read equal."""
    count = 0

    def slower(timed: TimedCall) -> float:
        nonlocal count
        count += 1
        return 1.0 + 1e-3 * count

    samples, _ = alternate({"a": TimedCall(int), "b": TimedCall(int)}, slower, rounds=51)
    a, b = (Timing.of(samples[name]).median for name in "ab")
    assert a == pytest.approx(b, rel=2e-3)


def test_a_call_that_raises_is_dropped_and_the_others_go_on() -> None:
    def broken() -> None:
        raise RuntimeError("no")

    def measure(timed: TimedCall) -> float:
        timed.call()
        return 2.0

    samples, failures = alternate({"good": TimedCall(int), "bad": TimedCall(broken)}, measure, rounds=3)
    assert samples == {"good": [2.0, 2.0, 2.0]}
    assert list(failures) == ["bad"]


def test_pauses_follow_rounds_and_a_deadline_ends_them() -> None:
    pauses: list[float] = []
    left = iter([False, False, True])
    samples, _ = alternate(
        {"a": TimedCall(int)},
        lambda t: 1.0,
        rounds=100,
        pause_seconds=0.08,
        sleep=pauses.append,
        deadline=lambda: next(left),
    )
    assert pauses == [0.08] * 3
    assert len(samples["a"]) == 3


def test_quantiles() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 6.0])
    assert (timing.p20, timing.median, timing.p80, timing.rounds) == (2.0, 3.5, 5.0, 6)


def test_repeats_aim_at_the_target() -> None:
    assert repeats_for(0.5, 1.5) == 3
    assert repeats_for(100.0, 1.5) == 1
    assert repeats_for(0.0, 1.5) == 32


def test_cpu_timer_divides_by_the_repeats() -> None:
    clock = SimpleNamespace(now=0.0)

    def call() -> None:
        clock.now += 0.004

    timed = TimedCall(call)
    timer = CpuTimer(target_ms=20.0, clock=lambda: clock.now)
    timer.estimate(timed)
    assert timed.repeats == 5
    assert timer.measure("kernel")(timed) == pytest.approx(4.0)


def test_host_times_of_a_missing_peer_are_a_reason() -> None:
    from flash_helpers.benchmark.peers import PEERS

    found = host_time.host_times([PEERS["fa2"], PEERS["sdpa-cpu"]], torch.device("cpu"), rounds=3)
    assert found["fa2"] == "unavailable: runs on cuda only"
    assert isinstance(found["sdpa-cpu"], Timing)
