"""``torch.cuda`` of a GPU that is not there: it says a known device's facts, and waits for nothing."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch

from flash_helpers.kernels.device_facts import DeviceFacts

MEMORY = 80 * 2**30  # bytes of the device, for tests that ask whether they fit


class Stream:
    """The one stream: on the host everything has happened when a call returns."""

    cuda_stream = 0
    device = torch.device("cuda", 0)
    device_index = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass

    wait_event = wait_stream = record = wait = lambda self, *_: None


class Event(Stream):
    """A moment that has passed. No time passes between two of them."""

    def elapsed_time(self, _: Event) -> float:
        return 1.0


class Graph:
    """A captured graph, which replays nothing: its kernels were asked for when it was captured."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def pool(self) -> tuple[int, int]:
        return (0, 0)

    replay = reset = capture_begin = capture_end = lambda self, *_, **__: None


def install(facts: DeviceFacts) -> None:
    """Replaces what ``torch.cuda`` asks of the driver. It stays so until the process ends."""
    major, minor = facts.capability
    properties = SimpleNamespace(
        name=facts.name,
        major=major,
        minor=minor,
        multi_processor_count=facts.sm_count,
        shared_memory_per_multiprocessor=facts.smem_per_sm,
        shared_memory_per_block_optin=facts.smem_per_block,
        L2_cache_size=facts.l2_bytes,
        max_threads_per_multi_processor=facts.threads_per_sm,
        total_memory=MEMORY,
    )

    def answers(value: Any) -> Any:
        return lambda *_, **__: value

    def context(*_: object, **__: object) -> Any:
        return contextlib.nullcontext()

    said: dict[str, Any] = {
        "_lazy_init": answers(None),
        "init": answers(None),
        "is_available": answers(True),
        "is_initialized": answers(True),
        "device_count": answers(1),
        "current_device": answers(0),
        "set_device": answers(None),
        "device": context,
        "get_device_capability": answers(facts.capability),
        "get_device_name": answers(facts.name),
        "get_device_properties": answers(properties),
        "is_bf16_supported": answers(True),
        "mem_get_info": answers((MEMORY, MEMORY)),
        "synchronize": answers(None),
        "current_stream": answers(Stream()),
        "default_stream": answers(Stream()),
        "stream": context,
        "set_stream": answers(None),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": context,
        "is_current_stream_capturing": answers(False),
        "set_sync_debug_mode": answers(None),
        "empty_cache": answers(None),
        "_sleep": answers(None),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": answers(None),
        "default_generators": (torch.default_generator,),
    }
    said |= {
        name: answers(0)
        for name in (
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
            "reset_peak_memory_stats",
        )
    }
    for name in ("getDevice", "setDevice", "exchangeDevice", "maybeExchangeDevice"):
        setattr(torch._C, f"_cuda_{name}", answers(0))
    for name, value in said.items():
        setattr(torch.cuda, name, value)
    torch.Generator = _Generator


class _Kind(type):
    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, _CpuGenerator)


_CpuGenerator = torch.Generator


class _Generator(metaclass=_Kind):
    """Makes generators of the CPU, where the numbers of this GPU are drawn."""

    def __new__(cls, device: object = "cpu") -> torch.Generator:
        return _CpuGenerator()
