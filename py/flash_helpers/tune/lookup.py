"""Reading tuning results: the user's database first, then the tables that ship with the package."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flash_helpers.build.families import FAMILIES, family_of
from flash_helpers.configs.device_facts import DeviceFacts
from flash_helpers.configs.dtype import DType
from flash_helpers.configs.kernel import ForwardConfig, ForwardKernel
from flash_helpers.configs.parsing import parse_kernel_name_into_config
from flash_helpers.tune.bucket import Bucket
from flash_helpers.tune.database import NotATuningDatabaseError, TuningDatabase
from flash_helpers.tune.device import TunedDevice, present_sources
from flash_helpers.tune.space import tuning_space
from flash_helpers.tune.tables import ShippedTable, TableError, families_of, shipped_table

MAX_DISTANCE = 2  # doublings of length or load over which a result is still worth more than the model


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
        families: the kernel families that took part.
    """

    bucket: Bucket
    source: str
    kernels: tuple[TunedKernel, ...]
    families: frozenset[str]


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
        return TunedBucket(nearest, source, tuple(kernels), families_of(m.kernel for m in rows))
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

    def best(self, problem: AttentionSizes, facts: DeviceFacts) -> tuple[ForwardConfig, str] | None:
        """The configuration that was quickest for such a problem on such a device, and how that is known."""
        ranked = self.ranked(problem, facts)
        return ranked[0] if ranked else None

    def ranked(self, problem: AttentionSizes, facts: DeviceFacts) -> list[tuple[ForwardConfig, str]]:
        """All measured configurations, the quickest first, each with the measurement in words.

        None where the family that was made for the device did not take part: the quickest of the others
        would say nothing about it.
        """
        found = self.of(problem, facts)
        if found is None or _newest_family(problem.dtype, problem.d_head, facts) not in found.families:
            return []
        return [
            (
                parse_kernel_name_into_config(kernel.kernel),
                f"{kernel.tflops:.1f} TFLOP/s on {found.bucket.label()}, {found.source}",
            )
            for kernel in found.kernels
        ]

    def of(self, problem: AttentionSizes, facts: DeviceFacts) -> TunedBucket | None:
        """What ``lookup`` finds for a problem; nothing where V's head size differs from Q's."""
        if problem.d_head_v != problem.d_head:
            return None
        bucket = Bucket.of(
            problem.dtype, problem.d_head, problem.causal, problem.batch * problem.n_heads,
            problem.seq_len_q, problem.seq_len_k, facts.sm_count,
        )  # fmt: skip
        state = _state_of(self._database.path)
        if state != self._state:
            self._state = state
            self._found.clear()
        key = (bucket, TunedDevice.of(facts, self._driver))
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
    return TunedBucket(bucket, source, tuple(TunedKernel(*row) for row in entry.kernels), entry.families)


@functools.cache
def _newest_family(dtype: DType, d_head: int, facts: DeviceFacts) -> str | None:
    """The family with the most special instructions that has kernels for these on the device."""
    fitting = {
        family_of(ForwardKernel(config)).name
        for config in tuning_space()
        if (config.dtype, config.d_head) == (dtype, d_head) and config.infeasible_reason(facts) is None
    }
    return next((family.name for family in reversed(FAMILIES) if family.name in fitting), None)


def _state_of(path: Path) -> object:
    """Changes whenever something is written."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_size, facts.st_mtime_ns
