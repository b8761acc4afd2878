"""Times on a CUDA device: events on the current stream, read only after they have happened.

kernel  back-to-back calls, all enqueued while the GPU still sleeps, so that no launch cost shows.
cold    as kernel, but the L2 cache is filled with other data before each call, outside the events. The
        data is read, as the weights of a model are.
dirty   as cold, but the data is written, and goes back to memory while the call is timed: up to the whole L2
        cache, which takes an H100's memory 16 us.
graph   one CUDA graph of several calls, replayed: kernels without any host in between.
call    wall time of calls from Python until the GPU has finished, host included.
host    host time of a call alone: how long Python is busy before it could do something else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from flash_helpers.benchmark.timing import Measure, TimedCall, repeats_for

ATTEMPTS = 3  # at hiding the launch cost, each behind a longer sleep
COLD_REPEATS = 8
HOST_CALLS = 100  # far below the 1,024 launches after which a launch waits for the GPU


class CudaTimer:
    """Measures calls that enqueue work on the current stream of ``device``.

    Args:
        device: the device of the call's tensors.
        target_ms: GPU time that one measurement aims at.
    """

    modes: tuple[str, ...] = ("kernel", "cold", "dirty", "graph", "call", "host")

    def __init__(self, device: torch.device, target_ms: float = 1.5) -> None:
        self._device = device
        self._target_ms = target_ms
        properties = torch.cuda.get_device_properties(device)
        # _sleep counts cycles; a clock below the maximum only makes the sleep longer.
        self._cycles_per_second = 1e3 * (getattr(properties, "clock_rate", 0) or 2_000_000)
        self._l2_bytes = getattr(properties, "L2_cache_size", 0) or (64 << 20)
        self._l2_filler: torch.Tensor | None = None

    def measure(self, mode: str) -> Measure:
        """The function that measures in ``mode``.

        Raises:
            ValueError: no such mode.
        """
        if mode not in self.modes:
            raise ValueError(f"unknown timing mode {mode!r}; on CUDA: {', '.join(self.modes)}")
        return {
            "kernel": self._kernel,
            "cold": self._cold,
            "dirty": lambda timed: self._cold(timed, written=True),
            "graph": self._graph,
            "call": self._call,
            "host": self._host,
        }[mode]

    def estimate(self, timed: TimedCall) -> None:
        """Two calls to warm up (compilers, heuristics), three to time host and GPU."""
        with torch.cuda.device(self._device), timed.context():
            for _ in range(2):
                timed.call()
            start, end = self._events()
            torch.cuda.synchronize()
            clock = time.perf_counter()
            start.record()
            for _ in range(3):
                timed.call()
            end.record()
            timed.host_seconds = (time.perf_counter() - clock) / 3
            end.synchronize()
            timed.milliseconds = start.elapsed_time(end) / 3
        timed.repeats = repeats_for(timed.milliseconds, self._target_ms)

    def _kernel(self, timed: TimedCall) -> float:
        warm_ups = max(1, timed.repeats // 3)

        def enqueue() -> Callable[[], float]:
            start, end = self._events()
            for _ in range(warm_ups):
                timed.call()
            start.record()
            for _ in range(timed.repeats):
                timed.call()
            end.record()
            return lambda: start.elapsed_time(end) / timed.repeats

        return self._behind_sleep(timed, enqueue, timed.host_seconds * (warm_ups + timed.repeats))

    def _cold(self, timed: TimedCall, written: bool = False) -> float:
        if self._l2_filler is None:
            self._l2_filler = torch.zeros(2 * self._l2_bytes // 4, dtype=torch.int32, device=self._device)
        filler, repeats = self._l2_filler, min(timed.repeats, COLD_REPEATS)

        def enqueue() -> Callable[[], float]:
            pairs = [self._events() for _ in range(repeats)]
            for start, end in pairs:
                filler.zero_() if written else filler.sum()
                start.record()
                timed.call()
                end.record()
            return lambda: statistics.median(start.elapsed_time(end) for start, end in pairs)

        return self._behind_sleep(timed, enqueue, (timed.host_seconds + 40e-6) * repeats)

    def _graph(self, timed: TimedCall) -> float:
        graph = timed.state.get("graph")
        if graph is None:
            graph = timed.state["graph"] = self._capture(timed)

        def enqueue() -> Callable[[], float]:
            start, end = self._events()
            graph.replay()
            start.record()
            graph.replay()
            end.record()
            return lambda: start.elapsed_time(end) / timed.repeats

        return self._behind_sleep(timed, enqueue, 300e-6)

    def _call(self, timed: TimedCall) -> float:
        with torch.cuda.device(self._device):
            timed.call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(timed.repeats):
                timed.call()
            torch.cuda.synchronize()
            return (time.perf_counter() - start) * 1e3 / timed.repeats

    def _host(self, timed: TimedCall) -> float:
        with torch.cuda.device(self._device):
            for _ in range(5):
                timed.call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                timed.call()
            elapsed = time.perf_counter() - start
            torch.cuda.synchronize()
            return elapsed * 1e3 / HOST_CALLS

    def _behind_sleep(
        self, timed: TimedCall, enqueue: Callable[[], Callable[[], float]], host_seconds: float
    ) -> float:
        """Enqueues work while the GPU sleeps, and reads the time when all of it is done.

        The launches are hidden when the GPU has not left its sleep by the time that the last of
        them is enqueued; otherwise it tries again behind a longer sleep.
        """
        seconds = 1.5 * host_seconds + 50e-6
        milliseconds = float("nan")
        with torch.cuda.device(self._device):
            for _ in range(ATTEMPTS):
                torch.cuda._sleep(int(seconds * self._cycles_per_second))
                awake = torch.cuda.Event()
                awake.record()
                read = enqueue()
                hidden = not awake.query()
                torch.cuda.current_stream().synchronize()
                milliseconds = read()
                if hidden:
                    return milliseconds
                seconds *= 3
        timed.launch_hidden = False
        return milliseconds

    def _capture(self, timed: TimedCall) -> torch.cuda.CUDAGraph:
        """``timed.repeats`` calls in one graph."""
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # first calls on a new stream may allocate, which a capture forbids
                timed.call()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(timed.repeats):
                    timed.call()
        return graph

    @staticmethod
    def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
