"""Tuned tables as JSON: one a card, made from a database, shipped with the package."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_helpers.build.families import family_of
from flash_helpers.configs.kernel import ForwardKernel
from flash_helpers.configs.parsing import parse_kernel_name_into_config
from flash_helpers.tune.bucket import Bucket
from flash_helpers.tune.database import TuningDatabase
from flash_helpers.tune.device import TunedDevice, present_sources

SCHEMA = 1
FOLDER = Path(__file__).parent / "tables"
KERNELS_A_BUCKET = 5  # the best, and what selection may fall back to where the best isn't built
_REMEDY = "write it anew with: flash-attention tune --export"

Entry = tuple[str, float, float]
"""(short form, milliseconds, TFLOP/s)."""


class TableError(ValueError):
    """A file is no tuned table, or there is nothing to make one of."""


@dataclass(frozen=True)
class TableBucket:
    """One bucket of a table.

    Attributes:
        kernels: the best, the fastest first.
        families: the kernel families that took part.
    """

    kernels: tuple[Entry, ...]
    families: frozenset[str]


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
    device: TunedDevice, path: Path | None = None, database: TuningDatabase | None = None
) -> Path:
    """Writes the table of one card from what is in the database for the kernels of now.

    Args:
        device: the card and its driver.
        path: the file; ``None``: the card's place in the package.
        database: ``None``: the user's.

    Returns:
        The file.

    Raises:
        TableError: nothing was measured on this card with this driver and these kernels.
    """
    database, sources = database or TuningDatabase(), present_sources()
    buckets: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for bucket in database.buckets(device, sources):
        everything = database.measurements(device, sources, bucket)
        rows = [m for m in everything if m.milliseconds]
        best = rows[:KERNELS_A_BUCKET]
        facts = max((facts, *(m.facts for m in best)), key=lambda f: str(f.get("measured_at", "")))
        buckets.append(
            {
                "bucket": bucket.to_json(),
                "problem": best[0].problem.to_json(),
                "measured": len(rows),
                "families": sorted(families_of(m.kernel for m in everything)),
                "kernels": [
                    {"kernel": m.kernel, "milliseconds": m.milliseconds, "tflops": m.tflops} for m in best
                ],
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
        "facts": facts,
        "buckets": buckets,
    }
    path = path or FOLDER / _file_name(device.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def load_table(path: Path) -> ShippedTable:
    """Reads a table.

    Raises:
        TableError: unreadable, or of another schema.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise TableError(f"{path} has schema {document['schema']}, this version reads schema {SCHEMA}")
        buckets = {
            Bucket.from_json(entry["bucket"]): TableBucket(
                tuple(
                    (str(row["kernel"]), float(row["milliseconds"]), float(row["tflops"]))
                    for row in entry["kernels"]
                ),
                frozenset(entry["families"]),
            )
            for entry in document["buckets"]
        }
        device = TunedDevice(document["gpu"], document["capability"], document["driver"])
        return ShippedTable(device, buckets, document["facts"])
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise TableError(f"{path} can't be read as a tuned table: {error!r}; {_REMEDY}") from error
    except json.JSONDecodeError as error:
        raise TableError(f"{path} can't be read as a tuned table: {error}; {_REMEDY}") from error


def families_of(kernels: Iterable[str]) -> frozenset[str]:
    """The families of kernels given by their short forms."""
    return frozenset(family_of(ForwardKernel(parse_kernel_name_into_config(name))).name for name in kernels)


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


def _file_name(gpu: str) -> str:
    return re.sub(r"[^0-9a-z]+", "_", gpu.lower()).strip("_") + ".json"
