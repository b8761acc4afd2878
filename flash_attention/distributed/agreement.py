"""Whether all ranks of a group are asked for the same: compared before anything else is sent."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from datetime import timedelta
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attention.checks.options import checked_number
from flash_attention.distributed.layout import Layout
from flash_attention.distributed.letting_go import let_go
from flash_attention.errors import PeerLostError, RanksDisagreeError

SIZE = 2048  # bytes of one rank's description
TIMEOUT = timedelta(seconds=60)  # of a call that says nothing else
CALL = "the call"  # the entry that says which function
REFUSED = "refused"  # the entry of a rank that has no call to describe

# Groups of the CPU beside the callers' groups, so that no call of the caller's meets one of ours.
_controls: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
_agreed: set[tuple[int, bytes]] = set()


def agree(
    group: dist.ProcessGroup, entries: dict[str, str], timeout: timedelta, *, always: bool = True
) -> None:
    """Returns where all ranks of the group have given equal entries.

    Args:
        group: whose ranks call this together.
        entries: what is compared, by the names that a message uses.
        timeout: how long the others may take.
        always: compare again what has been agreed on before. Else all ranks must pass False.

    Raises:
        RanksDisagreeError: they have not; the message says who has what.
        PeerLostError: a rank did not answer.
    """
    text = json.dumps(entries).encode()
    if len(text) > SIZE:
        text = json.dumps({name: value[:120] for name, value in entries.items()}).encode()[:SIZE]
    key = (id(group), hashlib.sha256(text).digest())
    if not always and key in _agreed:
        return
    for rank, other in enumerate(_exchanged(group, text, timeout)):
        if other != text:
            raise RanksDisagreeError(_difference(dist.get_rank(group), text, rank, other))
    if REFUSED not in entries:
        _agreed.add(key)


def checked_timeout(seconds: object) -> timedelta:
    """The ``timeout`` of a call."""
    number = checked_number("timeout", seconds)
    if not 0 < number < 1e7:
        raise ValueError(f"timeout is {number}; it must be a number of seconds above 0, up to 1e7")
    return timedelta(seconds=number)


def refuse(group: dist.ProcessGroup | None, error: Exception, timeout: timedelta) -> None:
    """Tells the other ranks that this one has refused its arguments, so that they need not wait for it.

    None: nothing says who they are.
    """
    if group is None:
        return
    text = json.dumps({REFUSED: f"{type(error).__name__}: {error}"[: SIZE // 2]}).encode()[:SIZE]
    with contextlib.suppress(PeerLostError):  # the error that was found is the one to tell
        _exchanged(group, text, timeout)


def _exchanged(group: dist.ProcessGroup, text: bytes, timeout: timedelta) -> list[bytes]:
    try:
        control = _control(group, timeout)
        own = torch.zeros(SIZE, dtype=torch.uint8, device="cpu")
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        with let_go((own, *every)):
            dist.all_gather(every, own, group=control, async_op=True).wait(timeout)
    except (RuntimeError, dist.DistBackendError) as error:
        raise lost(group, timeout, error) from error
    return [bytes(x.tolist()).rstrip(b"\0") for x in every]


def lost(group: dist.ProcessGroup, timeout: timedelta, error: Exception) -> PeerLostError:
    """The error for ranks that did not all answer."""
    return PeerLostError(
        f"rank {dist.get_rank(group)} of the context-parallel group had no answer from every other rank "
        f"within {timeout.total_seconds():g} s: a process has ended, or does not make this call; look at "
        "the messages of the others first, then start all ranks again (a slow one needs a larger "
        f"timeout). The transport says: {str(error).splitlines()[0] if str(error) else repr(error)}"
    )


def _control(group: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    found = _controls.get(id(group))
    if found is None or found[0] is not group:
        control = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout,
            backend="gloo",
            use_local_synchronization=True,
        )
        found = _controls[id(group)] = (group, control)
    return found[1]


def _difference(rank: int, own: bytes, other_rank: int, other: bytes) -> str:
    try:
        ours, theirs = json.loads(own), json.loads(other)
    except ValueError:
        return f"rank {rank} and rank {other_rank} of the context-parallel group make different calls"
    if REFUSED in theirs:
        return (
            f"rank {other_rank} of the context-parallel group refused its arguments, so that no rank "
            f"computes: {theirs[REFUSED]}"
        )
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if CALL in names:  # nothing else can be compared
        names = [CALL]
    what = "; ".join(
        f"{name} is {ours.get(name, 'missing')} on rank {rank} and {theirs.get(name, 'missing')} on rank "
        f"{other_rank}"
        for name in names
    )
    return f"the ranks of the context-parallel group disagree: {what}; all must pass the same"


@lru_cache(maxsize=256)
def of_layout(layout: Layout) -> str:
    """What ranks compare of a layout."""
    return f"{layout.name} of {layout.total}, number {digest(repr((layout.ranks, layout.documents)))}"


def of_values(tensors: Iterable[Tensor]) -> str:
    """What ranks compare of the values of tensors, which are read for it."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(f"{x.dtype} {tuple(x.shape)}".encode())
        found.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"number {found.hexdigest()[:12]}"


def digest(text: str) -> str:
    """A short number of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
