"""No thread of gloo holds a tensor of a call that has returned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flash_attention.distributed import Layout, agreement, gather, letting_go
from flash_attention.distributed.letting_go import let_go

HELD = 0.3  # seconds for which a thread holds what it was given


@pytest.fixture
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Views, whose bases are held as gloo's threads hold them: longer than the call takes."""
    views: list[Tensor] = []
    plain = dist.all_gather

    def all_gather(every: list[Tensor], own: Tensor, **options: Any) -> Any:
        work = plain(every, own, **options)
        views.extend(x.view(-1) for x in (*every, own))
        threading.Timer(HELD, views.clear).start()
        return work

    monkeypatch.setattr(dist, "all_gather", all_gather)
    return views


CALLS: dict[str, Callable[[Any], object]] = {
    "agree": lambda group: agreement.agree(group, {"x": "1"}, timedelta(seconds=5)),
    "refuse": lambda group: agreement.refuse(group, ValueError("x"), timedelta(seconds=5)),
    "gather": lambda group: gather(torch.zeros(1, 8), Layout.zigzag(8, 1), group),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_returns_when_its_tensors_are_held_no_more(name: str, group: Any, held: list[Tensor]) -> None:
    CALLS[name](group)
    assert not held


def test_a_thread_that_holds_them_for_ever_is_left(
    group: Any, held: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letting_go, "LONGEST", 0.02)
    CALLS["gather"](group)
    assert held


@pytest.mark.parametrize(("device", "waits"), [("cpu", True), ("meta", False)])
def test_nobody_waits_for_tensors_of_another_device(
    device: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL may hold them until the device has worked."""
    pauses: list[float] = []
    monkeypatch.setattr(letting_go, "LONGEST", 0.02)
    monkeypatch.setattr(time, "sleep", pauses.append)
    x = torch.zeros(8, device=device)
    with let_go((x,)):
        view = x.view(2, 4)
    assert view._base is x
    assert bool(pauses) is waits
