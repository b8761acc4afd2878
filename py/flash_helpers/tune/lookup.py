"""Reading tuning results: the user's database first, then the tables that ship with the package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flash_helpers.configs.device_facts import DeviceFacts
from flash_helpers.configs.dtype import DType
from flash_helpers.configs.kernel import ForwardConfig, ForwardKernel
from flash_helpers.configs.parsing import parse_kernel_name_into_config
from flash_helpers.configs.traits import ForwardTraits
from flash_helpers.tune.bucket import Bucket
from flash_helpers.tune.database import NotATuningDatabaseError, TuningDatabase
from flash_helpers.tune.device import TunedDevice, present_sources
from flash_helpers.tune.tables import ShippedTable, TableError, shipped_table

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
    """The measured kernels of a bucket on a device.

    The bucket itself before near ones, the user's results before the shipped ones. The user's count when
    card, driver and kernel sources are those of now; shipped ones when the card is the same.

    Args:
        bucket: what is asked for.
        device: the card and its driver.
        database: the user's results; ``None``: the default file.

    Returns:
        The kernels, the fastest first; ``None`` when nothing near was measured.
    """
    database = database or TuningDatabase()
    sources = present_sources()
    table = shipped_table(device)
    own = database.buckets(device, sources)
    shipped = list(table.buckets) if table else []
    near = [b for b in own + shipped if b.distance(bucket) <= MAX_DISTANCE]
    if not near:
        return None
    nearest = min(near, key=lambda b: (b.distance(bucket), b))
    if nearest in own:
        rows = database.measurements(device, sources, nearest)
        kernels = [
            TunedKernel(m.kernel, m.milliseconds, m.tflops) for m in rows if m.milliseconds and m.tflops
        ]
        source = f"measured on this machine ({database.path})"
        return TunedBucket(nearest, source, tuple(kernels), frozenset(m.kernel for m in rows))
    assert table is not None
    return _shipped(nearest, table)


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
    """

    def __init__(self, path: Path | None = None, driver: str | None = None) -> None:
        self._database = TuningDatabase(path)
        self._driver = driver
        self._state: object = None
        self._found: dict[tuple[Bucket, TunedDevice], TunedBucket | None] = {}

    def ranked(
        self, problem: AttentionSizes, facts: DeviceFacts, chosen: ForwardConfig | None = None
    ) -> list[tuple[ForwardConfig, str]]:
        """The measured configurations worth taking, the quickest first, each with its measurement in words.

        Args:
            problem: the problem.
            facts: the device.
            chosen: what is taken where nothing was measured. Results count where it took part: those that are
                ahead of it by ``OWN_LEAD``, in a near bucket by ``NEAR_LEAD``, then itself.
        """
        found = self.of(problem, facts)
        if found is None:
            return []
        kernels = found.kernels
        if chosen is not None:
            name = ForwardKernel(chosen, ForwardTraits(causal=problem.causal)).short_form()
            if name not in found.took_part:
                return []
            lead = OWN_LEAD if found.bucket == _bucket_of(problem, facts) else NEAR_LEAD
            kernels = tuple(_up_to(name, kernels, lead))
        return [
            (
                parse_kernel_name_into_config(kernel.kernel),
                f"{kernel.tflops:.1f} TFLOP/s on {found.bucket.label()}, {found.source}",
            )
            for kernel in kernels
        ]

    def of(self, problem: AttentionSizes, facts: DeviceFacts) -> TunedBucket | None:
        """What ``lookup`` finds for a problem; nothing where V's head size differs from Q's."""
        if problem.d_head_v != problem.d_head:
            return None
        state = _state_of(self._database.path)
        if state != self._state:
            self._state = state
            self._found.clear()
        key = (_bucket_of(problem, facts), TunedDevice.of(facts, self._driver))
        if key not in self._found:
            try:
                self._found[key] = lookup(*key, self._database)
            except (
                OSError,
                NotATuningDatabaseError,
                TableError,
            ) as error:  # a call must not fail for want of advice
                print(f"flash_attention: no tuning results are used: {error}", file=sys.stderr)
                self._found[key] = None
        return self._found[key]


def _shipped(bucket: Bucket, table: ShippedTable) -> TunedBucket:
    entry = table.buckets[bucket]
    source = f"from the shipped table of {table.device.gpu}, driver {table.device.driver}"
    return TunedBucket(bucket, source, tuple(TunedKernel(*row) for row in entry.kernels), entry.took_part)


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
