"""Ranks as threads of one process: the programs run as they do between processes, on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from flash_attention.distributed.engine import Plan
from flash_attention.distributed.pairs import Arithmetic
from flash_attention.distributed.schedule import Message, Schedule
from flash_attention.distributed.transport import Parcel

ANSWER_S = 60.0


class Post:
    """Where the threads leave their messages."""

    def __init__(self) -> None:
        self._boxes: dict[Message, Queue[tuple[Tensor, ...]]] = {}

    def box(self, message: Message) -> Queue[tuple[Tensor, ...]]:
        return self._boxes.setdefault(message, Queue())


class Waiting:
    """Messages of one thread that travel."""

    def __init__(self, post: Post, receives: Sequence[Parcel]) -> None:
        self._post, self._receives = post, receives

    def wait(self) -> None:
        for message, tensors in self._receives:
            for into, x in zip(tensors, self._post.box(message).get(timeout=ANSWER_S), strict=True):
                into.copy_(x)


class ThreadTransport:
    """A ``Transport`` between threads."""

    def __init__(self, post: Post, rank: int) -> None:
        self.post, self.rank = post, rank

    def start(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Waiting:
        for message, tensors in sends:
            assert all(x.is_contiguous() for x in tensors)
            self.post.box(message).put(tuple(x.clone() for x in tensors))
        return Waiting(self.post, receives)


def on_every_rank(
    schedule: Schedule, arithmetic: Arithmetic, function: Callable[[Plan], Any], with_lse: bool = True
) -> list[Any]:
    """What a function returns for the plan of each rank."""
    post = Post()

    def run(rank: int) -> Any:
        transport: Any = ThreadTransport(post, rank)
        with torch.no_grad():
            return function(Plan(schedule, transport, arithmetic, arithmetic, with_lse))

    world = schedule.layout.world
    with ThreadPoolExecutor(world) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(world)]]
