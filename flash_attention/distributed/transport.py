"""Messages between the ranks of a process group: each is a few tensors, sent from one rank to one other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attention.distributed.schedule import Message
from flash_attention.errors import PeerLostError

_met: dict[int, dist.ProcessGroup] = {}


def meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """All ranks of a group on GPUs once make one call together, since NCCL connects them in the first.

    A rank that has nothing to send or to receive takes no part in an exchange.
    """
    if device.type == "cuda" and _met.get(id(group)) is not group:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _met[id(group)] = group


class Parcel(NamedTuple):
    """A message and its tensors: what is sent, or the memory for what comes."""

    message: Message
    tensors: tuple[Tensor, ...]


class Pending:
    """Messages that travel. Their tensors must not be written, or read, before ``wait`` has returned."""

    def __init__(self, transport: Transport, parcels: Sequence[Parcel], works: list[Any]) -> None:
        self._transport, self._parcels, self._works = transport, parcels, works

    def wait(self) -> None:
        """Returns when the messages have come; on a GPU, work that is launched from then on waits for them.

        Raises:
            PeerLostError: a peer is gone, or did not send or receive within the time limit.
        """
        transport = self._transport
        try:
            for work in self._works:
                # With NCCL a time limit would make the host wait for the device; the group has its own.
                if transport.waits:
                    work.wait(transport.timeout)
                else:
                    work.wait()
        except (RuntimeError, dist.DistBackendError) as error:
            raise PeerLostError(_what_was_lost(transport, self._parcels, error)) from error
        self._works, self._parcels = [], ()


class Transport:
    """Sends and receives among the ranks of a group.

    Attributes:
        group: the process group.
        rank: this process's rank in it.
        timeout: how long a message may take.
        waits: whether ``Pending.wait`` is bounded by it: where the CPU waits, as with gloo.
        sent: bytes that this rank has sent since it was made.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta, device: torch.device) -> None:
        self.group, self.timeout = group, timeout
        self.rank = dist.get_rank(group)
        self.waits = device.type == "cpu"
        self.sent = 0

    def start(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Pending:
        """Begins to send and to receive.

        Raises:
            PeerLostError: a peer is known to be gone.
        """
        ops = []
        for parcels, function in ((sends, dist.isend), (receives, dist.irecv)):
            for parcel in parcels:
                m = parcel.message
                peer = dist.get_global_rank(self.group, m.target if function is dist.isend else m.source)
                for x in parcel.tensors:
                    assert x.is_contiguous()
                    if x.numel():
                        ops.append(dist.P2POp(function, x, peer, self.group))
        self.sent += sum(x.nbytes for parcel in sends for x in parcel.tensors)
        parcels = [*sends, *receives]
        if not ops:
            return Pending(self, (), [])
        try:
            return Pending(self, parcels, dist.batch_isend_irecv(ops))
        except (RuntimeError, dist.DistBackendError) as error:
            raise PeerLostError(_what_was_lost(self, parcels, error)) from error


def _what_was_lost(transport: Transport, parcels: Sequence[Parcel], error: Exception) -> str:
    peers = sorted(
        {m.target if m.source == transport.rank else m.source for m in (parcel.message for parcel in parcels)}
    )
    names = ", ".join(map(str, peers))
    return (
        f"rank {transport.rank} of the context-parallel group did not finish its exchange with "
        f"{'rank' if len(peers) == 1 else 'one of the ranks'} {names} within "
        f"{transport.timeout.total_seconds():g} s: that process has ended, fails, or makes other calls; look "
        f"at its messages first, then start all ranks again (a slow one needs a larger timeout). The "
        f"transport says: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    )
