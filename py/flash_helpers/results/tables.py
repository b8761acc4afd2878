"""Tuned tables as JSON: one a card, made from a database, shipped with the package."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_helpers import generation
from flash_helpers.content import CONTENT_ERRORS, ContentError, amount, read_json, typed
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.messages import say_once
from flash_helpers.results.bucket import Bucket
from flash_helpers.results.database import TuningDatabase
from flash_helpers.results.device import TunedDevice, present_sources
from flash_helpers.select.choice import chosen_kernels

SCHEMA = 1
FOLDER = Path(__file__).parent / "tables"
KERNELS_A_BUCKET = 5  # the best, and what selection may fall back to where the best gives no log-sum-exp
_REMEDY = "write it anew with: flash-attention tune --budget 0 --export FILE"

Entry = tuple[str, float, float]
"""(short form, milliseconds, TFLOP/s)."""


class TableError(ValueError):
    """A file is no tuned table, or there is nothing to make one of."""


@dataclass(frozen=True)
class TableBucket:
    """One bucket of a table.

    Attributes:
        kernels: the best and the chosen ones, the fastest first.
        took_part: those, and chosen ones that gave no time.
    """

    kernels: tuple[Entry, ...]
    took_part: frozenset[str]


@dataclass(frozen=True)
class ShippedTable:
    """The best kernels of one card.

    Attributes:
        device: the card, and the driver that it was measured with.
        buckets: what is known of each.
        facts: torch, CUDA, commit and date of the measurements.
    """

    device: TunedDevice
    buckets: dict[Bucket, TableBucket]
    facts: dict[str, Any]


def export_table(
    facts: DeviceFacts,
    path: Path | None = None,
    database: TuningDatabase | None = None,
    driver: str | None = None,
) -> Path:
    """Writes the table of one card from what is in the database for the kernels of now.

    Of each bucket: the best kernels, and those that the families' own tables choose, since a tuned kernel is
    only taken where the chosen one was measured beside it.

    Args:
        facts: the card.
        path: the file, or a folder for a file named after the card; ``None``: the package's own folder.
        database: ``None``: the user's.
        driver: in place of this machine's.

    Returns:
        The file.

    Raises:
        TableError: nothing was measured on this card with this driver and these kernels.
    """
    database, sources = database or TuningDatabase(), present_sources()
    device = TunedDevice.of(facts, driver)
    buckets: list[dict[str, Any]] = []
    latest: dict[str, Any] = {}
    for bucket in database.buckets(device, sources):
        everything = database.measurements(device, sources, bucket)
        rows = [m for m in everything if m.milliseconds]
        if not rows:
            continue  # those that were there are damaged
        chosen = {kernel.short_form() for kernel in chosen_kernels(rows[0].problem, facts)}
        shown = [m for rank, m in enumerate(rows) if rank < KERNELS_A_BUCKET or m.kernel in chosen]
        latest = max((latest, *(m.facts for m in shown)), key=lambda f: str(f.get("measured_at", "")))
        buckets.append(
            {
                "bucket": bucket.to_json(),
                "problem": rows[0].problem.to_json(),
                "measured": len(rows),
                "kernels": [
                    {"kernel": m.kernel, "milliseconds": m.milliseconds, "tflops": m.tflops} for m in shown
                ],
                "without_time": [m.kernel for m in everything if m.kernel in chosen and not m.milliseconds],
            }
        )
    if not buckets:
        known = "; ".join(f"{d.gpu}, driver {d.driver}" for d in database.devices()) or "nothing"
        raise TableError(
            f"{database.path} has no results of {device.gpu}, driver {device.driver}, for the kernels of now "
            f"(it has: {known}). Run flash-attention tune first"
        )
    document = {
        "schema": SCHEMA,
        "gpu": device.gpu,
        "capability": device.capability,
        "driver": device.driver,
        "facts": latest,
        "buckets": buckets,
    }
    path = FOLDER if path is None else path
    if path.suffix != ".json":
        path /= _file_name(device.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    generation.begin()  # it may be a table that choices are made by
    return path


def load_table(path: Path) -> ShippedTable:
    """Reads a table. Damaged buckets are left out, which is said.

    Raises:
        TableError: unreadable, or of another schema.
    """
    try:
        document = read_json(path)
        if document["schema"] != SCHEMA:
            raise TableError(f"{path} has schema {document['schema']}, this version reads schema {SCHEMA}")
        device = TunedDevice(*(typed(document, name, str) for name in ("gpu", "capability", "driver")))
        buckets, facts = typed(document, "buckets", list), typed(document, "facts", dict)
    except TableError:
        raise
    except (OSError, *CONTENT_ERRORS) as error:
        raise TableError(f"{path} can't be read as a tuned table: {error!r}; {_REMEDY}") from error
    found = {}
    for entry in buckets:
        try:
            found[Bucket.from_json(entry["bucket"])] = _bucket(entry)
        except CONTENT_ERRORS:
            say_once(f"damaged entries of the tuned table {path} are left out; {_REMEDY}")
    return ShippedTable(device, found, facts)


def _bucket(entry: dict[str, Any]) -> TableBucket:
    kernels = tuple(
        (typed(row, "kernel", str), amount(row["milliseconds"]), amount(row["tflops"]))
        for row in typed(entry, "kernels", list)
    )
    if any(milliseconds == 0 for _, milliseconds, _ in kernels):
        raise ContentError("a kernel takes no time")
    without_time = typed(entry, "without_time", list)
    if not all(isinstance(name, str) for name in without_time):
        raise ContentError("a kernel without time has no name")
    return TableBucket(kernels, frozenset([*(name for name, _, _ in kernels), *without_time]))


def shipped_table(device: TunedDevice) -> ShippedTable | None:
    """The package's table of this card, whatever the driver; None when there is none."""
    return _table_of(FOLDER, device.gpu, device.capability)


@functools.cache
def _table_of(folder: Path, gpu: str, capability: str) -> ShippedTable | None:
    path = folder / _file_name(gpu)
    if not path.is_file():
        return None
    table = load_table(path)
    return table if (table.device.gpu, table.device.capability) == (gpu, capability) else None


generation.forgets(_table_of.cache_clear)


def _file_name(gpu: str) -> str:
    return re.sub(r"[^0-9a-z]+", "_", gpu.lower()).strip("_") + ".json"
