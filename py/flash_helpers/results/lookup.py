"""Reading tuning results: the user's database first, then the tables that ship with the package."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flash_helpers.content import CONTENT_ERRORS
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.kernel import ForwardConfig, ForwardKernel
from flash_helpers.kernels.parsing import parse_kernel_name_into_config
from flash_helpers.kernels.traits import ForwardTraits
from flash_helpers.messages import say_once
from flash_helpers.results.bucket import Bucket
from flash_helpers.results.database import NotATuningDatabaseError, TuningDatabase
from flash_helpers.results.device import TunedDevice, present_sources
from flash_helpers.results.tables import TableError, shipped_table

MAX_DISTANCE = 2  # doublings of length or load over which a result is still worth more than the model
OWN_LEAD = 1.01  # less is what two measurements of one kernel differ by
NEAR_LEAD = 1.03  # a kernel that leads by less in a near bucket may be behind in the one that is asked for


@dataclass(frozen=True)
class TunedKernel:
    """One measured kernel.

    Attributes:
        kernel: its short form.
        milliseconds: median time of a call on the bucket's problem.
        tflops: 10^12 FLOP a second.
    """

    kernel: str
    milliseconds: float
    tflops: float


@dataclass(frozen=True)
class TunedBucket:
    """The measured kernels of one bucket.

    Attributes:
        bucket: where they were measured, which may be near the one asked for.
        source: where the results are from, in words.
        kernels: the fastest first.
        took_part: those, and other kernels known to have been tried.
    """

    bucket: Bucket
    source: str
    kernels: tuple[TunedKernel, ...]
    took_part: frozenset[str]


class AttentionSizes(Protocol):
    """The sizes of an attention call, as kernels are selected by."""

    @property
    def dtype(self) -> DType: ...
    @property
    def batch(self) -> int: ...
    @property
    def n_heads(self) -> int: ...
    @property
    def seq_len_q(self) -> int: ...
    @property
    def seq_len_k(self) -> int: ...
    @property
    def d_head(self) -> int: ...
    @property
    def d_head_v(self) -> int: ...
    @property
    def causal(self) -> bool: ...


def lookup(bucket: Bucket, device: TunedDevice, database: TuningDatabase | None = None) -> TunedBucket | None:
    """The measured kernels of a bucket on a device, where any gave a time.

    The nearer bucket first; of two that are equally near the user's. The user's results count when card,
    driver and kernel sources are those of now; shipped ones when the card is the same.

    Args:
        bucket: what is asked for.
        device: the card and its driver.
        database: the user's results; ``None``: the default file.

    Returns:
        The kernels, the fastest first; ``None`` when nothing near was measured.
    """
    own = _measured_here(bucket, device, database or TuningDatabase())
    return next(iter(_by_distance(bucket, own, _shipped(bucket, device))), None)


def _measured_here(bucket: Bucket, device: TunedDevice, database: TuningDatabase) -> TunedBucket | None:
    """The user's results nearest to a bucket."""
    sources, source = present_sources(), f"measured on this machine ({database.path})"
    for near in _near(bucket, database.buckets(device, sources)):
        rows = database.measurements(device, sources, near)
        kernels = tuple(
            TunedKernel(m.kernel, m.milliseconds, m.tflops)
            for m in rows
            if m.milliseconds and m.tflops and _names_kernel(m.kernel, near)
        )
        if kernels:
            return TunedBucket(near, source, kernels, frozenset(m.kernel for m in rows))
    return None


def _shipped(bucket: Bucket, device: TunedDevice) -> TunedBucket | None:
    """The results nearest to a bucket in the table that ships for this card."""
    table = shipped_table(device)
    if table is None:
        return None
    for near in _near(bucket, table.buckets):
        entry = table.buckets[near]
        kernels = tuple(TunedKernel(*row) for row in entry.kernels if _names_kernel(row[0], near))
        if kernels:
            source = f"from the shipped table of {table.device.gpu}, driver {table.device.driver}"
            return TunedBucket(near, source, kernels, entry.took_part)
    return None


@functools.lru_cache(maxsize=4096)
def _names_kernel(name: str, bucket: Bucket) -> bool:
    """Whether a name is that of a kernel for the bucket's type and head size; a damaged one is not."""
    try:
        config = parse_kernel_name_into_config(name)
        fits = config.dtype is bucket.dtype and config.d_head >= bucket.d_head
        return fits and config.malformed_reason() is None
    except CONTENT_ERRORS:
        return False


def _near(bucket: Bucket, others: Iterable[Bucket]) -> list[Bucket]:
    """Those within ``MAX_DISTANCE``, the nearest first."""
    near = [other for other in others if other.distance(bucket) <= MAX_DISTANCE]
    return sorted(near, key=lambda other: (other.distance(bucket), other))


def _by_distance(bucket: Bucket, *found: TunedBucket | None) -> list[TunedBucket]:
    """The nearest first, equally near ones in the order given."""
    return sorted(filter(None, found), key=lambda each: each.bucket.distance(bucket))


def tuned_configs(device: TunedDevice, database: TuningDatabase | None = None) -> list[ForwardConfig]:
    """The quickest configuration of every tuned bucket of a device, each once.

    Raises:
        ValueError: nothing was tuned.
    """
    database, sources = database or TuningDatabase(), present_sources()
    table = shipped_table(device)
    buckets = [*database.buckets(device, sources), *(table.buckets if table else ())]
    found = [lookup(bucket, device, database) for bucket in dict.fromkeys(buckets)]
    names = dict.fromkeys(entry.kernels[0].kernel for entry in found if entry and entry.kernels)
    if not names:
        raise ValueError(f"no kernel was tuned on {device.gpu} yet: run flash-attention tune")
    return list(dict.fromkeys(map(parse_kernel_name_into_config, names)))


class TuningResults:
    """Tuning results as selection asks for them. Results are read again when the file changed.

    Args:
        path: the user's database; ``None``: the default file.
        driver: in place of this machine's.
        shipped_only: leave the user's results out.
    """

    def __init__(
        self, path: Path | None = None, driver: str | None = None, *, shipped_only: bool = False
    ) -> None:
        self._database = None if shipped_only else TuningDatabase(path)
        self._driver = driver
        self._state: object = None
        self._found: dict[tuple[Bucket, TunedDevice], list[TunedBucket]] = {}

    def ranked(
        self, problem: AttentionSizes, facts: DeviceFacts, chosen: ForwardConfig | None = None
    ) -> list[tuple[ForwardConfig, str]]:
        """The measured configurations worth taking, the quickest first, each with its measurement in words.

        Args:
            problem: the problem.
            facts: the device.
            chosen: what is taken where nothing was measured. Results count where it took part: those that are
                ahead of it by ``OWN_LEAD``, in a near bucket by ``NEAR_LEAD``, then itself. Where it took no
                part in the user's, those of the shipped table count.
        """
        name = chosen and ForwardKernel(chosen, ForwardTraits(causal=problem.causal)).short_form()
        for found in self._near(problem, facts):
            kernels: Sequence[TunedKernel] = found.kernels
            if name is not None:
                if name not in found.took_part:
                    continue
                lead = OWN_LEAD if found.bucket == _bucket_of(problem, facts) else NEAR_LEAD
                kernels = _up_to(name, kernels, lead)
            return [
                (
                    parse_kernel_name_into_config(kernel.kernel),
                    f"{kernel.tflops:.1f} TFLOP/s on {found.bucket.label()}, {found.source}",
                )
                for kernel in kernels
            ]
        return []

    def of(self, problem: AttentionSizes, facts: DeviceFacts) -> TunedBucket | None:
        """What ``lookup`` finds for a problem; nothing where V's head size differs from Q's."""
        return next(iter(self._near(problem, facts)), None)

    def _near(self, problem: AttentionSizes, facts: DeviceFacts) -> list[TunedBucket]:
        """The user's and the shipped results near a problem, the nearer ones first."""
        if problem.d_head_v != problem.d_head:
            return []
        if self._database is not None and (state := _state_of(self._database.path)) != self._state:
            self._state = state
            self._found.clear()
        key = (_bucket_of(problem, facts), TunedDevice.of(facts, self._driver))
        if key not in self._found:
            self._found[key] = self._read(*key)
        return self._found[key]

    def _read(self, bucket: Bucket, device: TunedDevice) -> list[TunedBucket]:
        """A call must not fail for want of advice: what can't be read is said, and left out."""
        own = shipped = None
        try:
            if self._database is not None:
                own = _measured_here(bucket, device, self._database)
        except (OSError, NotATuningDatabaseError) as error:
            say_once(f"no tuning results of this machine are used: {error}")
        try:
            shipped = _shipped(bucket, device)
        except TableError as error:
            say_once(f"no shipped tuning results are used: {error}")
        return _by_distance(bucket, own, shipped)


def _bucket_of(problem: AttentionSizes, facts: DeviceFacts) -> Bucket:
    return Bucket.of(
        problem.dtype, problem.d_head, problem.causal, problem.batch * problem.n_heads,
        problem.seq_len_q, problem.seq_len_k, facts.sm_count,
    )  # fmt: skip


def _up_to(name: str, kernels: Sequence[TunedKernel], lead: float) -> list[TunedKernel]:
    """Those of the kernels, the fastest first, that lead ``name`` by so much, then itself; all without it."""
    place = next((n for n, kernel in enumerate(kernels) if kernel.kernel == name), None)
    if place is None:  # it was tried and gave no time
        return list(kernels)
    own = kernels[place]
    return [*(k for k in kernels[:place] if k.milliseconds * lead <= own.milliseconds), own]


def _state_of(path: Path) -> object:
    """Changes whenever something is written."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
