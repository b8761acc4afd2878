"""Reading tuning results: the user's database first, then the tables that ship with the package."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flash_helpers.content import CONTENT_ERRORS
from flash_helpers.kernels.defaults import are_filled
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import direction_of, kernel_of
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.kernels.parsing import parse_kernel_name_into_config
from flash_helpers.kernels.problem import FORWARD
from flash_helpers.messages import say_once
from flash_helpers.results.bucket import Bucket
from flash_helpers.results.database import NotATuningDatabaseError, TuningDatabase
from flash_helpers.results.device import TunedDevice, present_sources
from flash_helpers.results.tables import TableError, shipped_table

NOISE = 1.01  # two measurements of one kernel differ by up to 1 %: a smaller lead is none


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
        bucket: where they were measured.
        source: where the results are from, in words.
        kernels: the best first: finalists, then what was measured less, each by time.
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
    @property
    def direction(self) -> str: ...


def lookup(bucket: Bucket, device: TunedDevice, database: TuningDatabase | None = None) -> TunedBucket | None:
    """The measured kernels of a bucket on a device, where any gave a time.

    The user's results come before the table that ships. They count when card, driver and kernel sources are
    those of now; shipped ones when the card is the same.

    Args:
        bucket: what is asked for.
        device: the card and its driver.
        database: the user's results; ``None``: the default file.

    Returns:
        The kernels, the fastest first; ``None`` when the bucket was not measured.
    """
    return _measured_here(bucket, device, database or TuningDatabase()) or _shipped(bucket, device)


def _measured_here(bucket: Bucket, device: TunedDevice, database: TuningDatabase) -> TunedBucket | None:
    """The user's results for a bucket."""
    rows = database.measurements(device, present_sources(), bucket)
    kernels = tuple(
        TunedKernel(m.kernel, m.milliseconds, m.tflops)
        for m in rows
        if m.milliseconds and m.tflops and _names_kernel(m.kernel, bucket)
    )
    if not kernels:
        return None
    source = f"measured on this machine ({database.path})"
    return TunedBucket(bucket, source, kernels, frozenset(m.kernel for m in rows))


def _shipped(bucket: Bucket, device: TunedDevice) -> TunedBucket | None:
    """The results for a bucket in the table that ships for this card."""
    table = shipped_table(device)
    entry = None if table is None else table.buckets.get(bucket)
    if table is None or entry is None or not entry.kernels:
        return None
    kernels = tuple(TunedKernel(*row) for row in entry.kernels if _names_kernel(row[0], bucket))
    if not kernels:
        return None
    source = f"from the shipped table of {table.device.gpu}, driver {table.device.driver}"
    return TunedBucket(bucket, source, kernels, entry.took_part)


@functools.lru_cache(maxsize=4096)
def _names_kernel(name: str, bucket: Bucket) -> bool:
    """Whether a name is that of a kernel of the bucket's direction, type and head size."""
    try:
        config = parse_kernel_name_into_config(name)
        fits = config.dtype is bucket.dtype and config.d_head >= bucket.d_head
        fits = fits and direction_of(config).name == bucket.direction
        return fits and config.malformed_reason() is None
    except CONTENT_ERRORS:
        return False


def tuned_configs(device: TunedDevice, database: TuningDatabase | None = None) -> list[KernelConfig]:
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
    """Tuning results as selection asks for them, as they are when a device is first asked about.

    What is written later does not count: a process that saw it would change its choices between two calls.

    Args:
        path: the user's database; ``None``: the default file.
        driver: in place of this machine's.
        shipped_only: leave the user's results out.

    Attributes:
        trouble: why results that should count could not be read; empty: all were read.
    """

    def __init__(
        self, path: Path | None = None, driver: str | None = None, *, shipped_only: bool = False
    ) -> None:
        self._database = None if shipped_only else TuningDatabase(path)
        self._driver = driver
        self._own: dict[TunedDevice, dict[Bucket, TunedBucket]] = {}
        self.trouble = ""

    def ranked(
        self, problem: AttentionSizes, facts: DeviceFacts, chosen: KernelConfig | None = None
    ) -> list[tuple[KernelConfig, str]]:
        """The measured configurations in the order to take them in, each with its measurement in words.

        The rule: the default gives way to what was measured beside it, in the problem's own bucket, to be
        faster by more than ``NOISE``. Near buckets decide nothing: their leads do not carry over. Nor does a
        lead at a bucket's own length where the problem's queries would leave more rows of blocks empty.

        Args:
            problem: the problem.
            facts: the device.
            chosen: the default, which runs where nothing was measured. Of the user's and the shipped
                results the first in which it took part count. ``None``: there is no default.
        """
        name = chosen and kernel_of(chosen, causal=problem.causal).short_form()
        for found in self._measured(problem, facts):
            if name is None or name in found.took_part:
                ahead, rest = _around(name, found.kernels)
                where = f"on {found.bucket.label()}, {found.source}"
                configs = [(parse_kernel_name_into_config(one.kernel), one) for one in (*ahead, *rest)]
                return [
                    (config, f"{one.tflops:.1f} TFLOP/s {where}")
                    for config, one in configs
                    if chosen is None or not _emptier(config, chosen, problem, found.bucket)
                ]
        return []

    def of(self, problem: AttentionSizes, facts: DeviceFacts) -> TunedBucket | None:
        """What ``lookup`` finds for a problem; nothing where V's head size differs from Q's."""
        return next(iter(self._measured(problem, facts)), None)

    def _measured(self, problem: AttentionSizes, facts: DeviceFacts) -> list[TunedBucket]:
        """The user's and the shipped results of the problem's bucket."""
        if problem.d_head_v != problem.d_head:
            return []
        bucket, device = _bucket_of(problem, facts), TunedDevice.of(facts, self._driver)
        own = self._all_of(device).get(bucket)
        try:
            shipped = _shipped(bucket, device)
        except TableError as error:
            shipped = None
            self._say(f"no shipped tuning results are used: {error}")
        return [found for found in (own, shipped) if found is not None]

    def _all_of(self, device: TunedDevice) -> dict[Bucket, TunedBucket]:
        """All of the user's results for a device. A call must not fail for want of advice."""
        if device not in self._own:
            found: dict[Bucket, TunedBucket] = {}
            try:
                if self._database is not None:
                    for bucket in self._database.buckets(device, present_sources()):
                        if (entry := _measured_here(bucket, device, self._database)) is not None:
                            found[bucket] = entry
            except (OSError, NotATuningDatabaseError) as error:
                found = {}
                self._say(f"no tuning results of this machine are used: {error}")
            self._own[device] = found
        return self._own[device]

    def _say(self, trouble: str) -> None:
        if trouble != self.trouble:
            say_once(trouble)
        self.trouble = trouble


def _bucket_of(problem: AttentionSizes, facts: DeviceFacts) -> Bucket:
    return Bucket.of(
        problem.dtype, problem.d_head, problem.causal, problem.batch * problem.n_heads,
        problem.seq_len_q, problem.seq_len_k, facts.sm_count, problem.direction,
    )  # fmt: skip


def _emptier(config: KernelConfig, chosen: KernelConfig, problem: AttentionSizes, bucket: Bucket) -> bool:
    """Whether the queries leave more rows of blocks empty than they leave of ``chosen``, and those of the
    bucket's length do not."""
    if problem.direction != FORWARD:
        return False
    own, others = config.B_r, (chosen.B_r,)
    return are_filled(bucket.queries, own, others) and not are_filled(problem.seq_len_q, own, others)


def _around(name: str | None, kernels: Sequence[TunedKernel]) -> tuple[list[TunedKernel], list[TunedKernel]]:
    """The kernels that are ahead of ``name`` by more than noise, the best first; then the others.

    ``name`` is the first of the others. Where it gave no time, all kernels are ahead of it. A kernel that
    stands behind ``name`` is never ahead, whatever its time: it was measured only a few times (``stage``).
    """
    place = next((n for n, kernel in enumerate(kernels) if kernel.kernel == name), None)
    if place is None:
        return list(kernels), []
    own = kernels[place]
    ahead = [kernel for kernel in kernels[:place] if kernel.milliseconds * NOISE <= own.milliseconds]
    return ahead, [own, *(kernel for kernel in kernels if kernel not in (own, *ahead))]
