"""What of a rank's messages computation hides, by a profile of one call, for ``context_parallel.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch


class Span(NamedTuple):
    """What one kernel or copy of the GPU took, in microseconds since the first began."""

    name: str
    stream: int
    begin: float
    end: float

    @property
    def is_message(self) -> bool:
        """Whether NCCL runs it."""
        return "nccl" in self.name.lower()


def spans_of(run: Callable[[], Any]) -> list[Span]:
    """Everything that one run starts on this rank's GPU, by its beginning."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = [
        Span(event.name, event.device_resource_id, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith("nccl:")  # a note of PyTorch's around kernels
    ]
    first = min((span.begin for span in found), default=0.0)
    return sorted(
        (span._replace(begin=span.begin - first, end=span.end - first) for span in found),
        key=lambda span: span.begin,
    )


def union(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The times at which any of them runs, one behind the other."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if found and span.begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], span.end)
        else:
            found.append((span.begin, span.end))
    return found


def common(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """How long both of two unions run."""
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in one for c, d in other)


def overlap(spans: list[Span], listed: int = 60) -> dict[str, Any]:
    """How long messages and computation took, alone and together, with the ``listed`` longest spans.

    Messages are NCCL's kernels: they begin where the first rank is ready, so that waiting for the other is
    in their time.
    """
    messages = union(span for span in spans if span.is_message)
    computing = union(span for span in spans if not span.is_message)

    def ms(parts: list[tuple[float, float]]) -> float:
        return sum(end - begin for begin, end in parts) / 1e3

    together = common(messages, computing) / 1e3
    longest = sorted(sorted(spans, key=lambda span: span.begin - span.end)[:listed], key=lambda s: s.begin)
    return {
        "span_ms": round(max((span.end for span in spans), default=0.0) / 1e3, 4),
        "messages_ms": round(ms(messages), 4),
        "computing_ms": round(ms(computing), 4),
        "together_ms": round(together, 4),
        "hidden": round(together / ms(messages), 4) if messages else None,
        "kernels": [
            {
                "name": s.name[:90],
                "stream": s.stream,
                "begin_us": round(s.begin, 1),
                "end_us": round(s.end, 1),
            }
            for s in longest
        ],
    }
