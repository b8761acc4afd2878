"""Processes that stay for a whole file, since importing torch takes longer than a case."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ANSWER_S = 240.0


class Ranks:
    """``run(function, *arguments)`` calls a function of a module on every rank, and returns their results."""

    def __init__(self, world: int, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._ends: list[Connection] = []
        self.processes = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, store, backend, there), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The results in the order of the ranks. A rank that raised has the exception's name and message."""
        for end in self._ends:
            end.send((function, arguments))
        results = []
        for rank, end in enumerate(self._ends):
            if not end.poll(ANSWER_S):
                raise TimeoutError(f"rank {rank} has not answered")
            try:
                results.append(end.recv())
            except EOFError:
                results.append(Gone())
        return results

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(20)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


class Gone:
    """What a rank that has ended answers."""


class Raised:
    """What a rank that raised answers."""

    def __init__(self, name: str, message: str, trace: str) -> None:
        self.name, self.message, self.trace = name, message, trace

    def __repr__(self) -> str:
        return f"{self.name}: {self.message}\n{self.trace}"


def _serve(rank: int, world: int, store: str, backend: str, end: Connection) -> None:
    torch.set_num_threads(1)
    importlib.import_module("flash_attention.distributed")  # now, and not within a case's time limit
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if backend == "nccl":
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            os._exit(0)
        try:
            end.send(function(*arguments))
        except Exception as error:
            end.send(Raised(type(error).__name__, str(error), traceback.format_exc()))
