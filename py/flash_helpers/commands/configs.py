"""``flash-attention configs``: which kernels there are, what they need, which are built."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flash_helpers.build import KernelCache, built_kernels
from flash_helpers.console.output import console_for, shown_bytes, write_json
from flash_helpers.console.writable import check_file
from flash_helpers.kernel_selection import select_kernels
from flash_helpers.kernels.device_facts import DeviceFacts, device_facts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.model.resources import occupancy, predict_registers


@dataclass(frozen=True)
class ConfigEntry:
    """One kernel of the list.

    Attributes:
        kernel: its short form.
        family: its family's name, and the direction's where that is not ``forward``.
        smem_bytes: shared memory of a block.
        registers: of a thread, predicted; None where the kernel has no cost model.
        blocks_per_sm: by these registers, on the device asked for; None where no device was asked for.
        infeasible: why that device can't run it, or None.
        built: the GPU generations it is built for.
    """

    kernel: str
    family: str
    smem_bytes: int
    registers: int | None
    blocks_per_sm: int | None
    infeasible: str | None
    built: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def list_configs(
    kernels: str = "all",
    causal: str = "no",
    dtype: str = "",
    d_head: int = 0,
    words: str = "",
    built: bool | None = None,
    device: str = "",
    cache: KernelCache | None = None,
) -> list[ConfigEntry]:
    """The kernels of a set that pass all filters.

    Args:
        kernels, causal: as in ``select_kernels``.
        dtype, d_head: only those; empty or 0: any.
        words: parts of the short form, joined by commas, that must all be in it.
        built: only those that are built for some generation, or for none; None: both.
        device: a known GPU model, to say whether it can run each.
        cache: in place of the user's.

    Raises:
        ValueError: an argument that names nothing; the message says what is valid.
    """
    wanted_dtype = DType.from_string(dtype) if dtype else None
    facts = device_facts(device) if device else None
    if d_head < 0:
        raise ValueError(f"d_head is {d_head}; it must be a head size, or 0 for any")
    wanted_words = [word.strip() for word in words.split(",") if word.strip()]
    targets: dict[str, list[int]] = {}
    for name, target in built_kernels(cache or KernelCache(), range(80, 200)):
        targets.setdefault(name, []).append(target)
    entries = []
    for kernel in select_kernels(kernels, causal):
        name, config = kernel.short_form(), kernel.config
        if wanted_dtype not in (None, config.dtype) or d_head not in (0, config.d_head):
            continue
        if not all(word in name for word in wanted_words):
            continue
        entry = _entry(kernel, facts, tuple(targets.get(name, ())))
        if built in (None, bool(entry.built)):
            entries.append(entry)
    return entries


def configs_command(
    kernels: str = "all",
    causal: str = "no",
    dtype: str = "",
    d_head: int = 0,
    words: str = "",
    built: bool | None = None,
    device: str = "",
    json_path: Path | None = None,
    console: Console | None = None,
) -> list[ConfigEntry]:
    """Prints what ``list_configs`` gives."""
    check_file(json_path)
    entries = list_configs(kernels, causal, dtype, d_head, words, built, device)
    console = console or console_for(json_path)
    table = Table()
    table.add_column("kernel", overflow="fold")
    table.add_column("family")
    for title in ("shared memory", "registers,\npredicted", "blocks per SM,\nby these", "built for"):
        table.add_column(title, justify="right")
    for e in entries:
        resident = "" if e.blocks_per_sm is None else str(e.blocks_per_sm)
        targets = ", ".join(f"sm_{target}" for target in e.built)
        name = Text(e.kernel if e.infeasible is None else f"{e.kernel}\n  {e.infeasible}")
        cells = (
            shown_bytes(e.smem_bytes),
            "" if e.registers is None else str(e.registers),
            resident,
            targets,
        )
        table.add_row(name, e.family, *cells, style="dim" if e.infeasible else "")
    if not entries:
        console.print(_none_passes(kernels, causal), style="yellow", markup=False, soft_wrap=True)
        write_json(json_path, [])
        return []
    console.print(table)
    n_built = sum(bool(e.built) for e in entries)
    able = "" if not device else f", {sum(e.infeasible is None for e in entries)} run on {device}"
    console.print(f"{len(entries)} kernels, {n_built} built{able}")
    write_json(json_path, [entry.to_json() for entry in entries])
    return entries


def _none_passes(kernels: str, causal: str) -> str:
    """What to say where the filters leave nothing: what they could have asked for."""
    given = select_kernels(kernels, causal)
    if not given:
        return f"{kernels!r} names no kernels"
    sizes = ", ".join(map(str, sorted({kernel.config.d_head for kernel in given})))
    words = ", ".join(sorted({word for kernel in given for word in _words(kernel)}))
    return (
        f"no kernel of {kernels!r} passes all filters. Its head sizes are {sizes}; the words of "
        f"its short forms are {words}"
    )


def _words(kernel: Kernel) -> list[str]:
    return kernel.short_form().partition(": ")[2].replace(" | ", "+").split("+")


def _entry(kernel: Kernel, facts: DeviceFacts | None, built: tuple[int, ...]) -> ConfigEntry:
    config, direction = kernel.config, direction_of(kernel)
    registers = None if direction.model is None else predict_registers(config).total
    resident, infeasible = None, None
    if facts is not None:
        infeasible = config.infeasible_reason(facts)
        if registers is not None:
            resident = occupancy(config.n_warps, registers, config.smem_bytes(), facts).blocks
    return ConfigEntry(
        kernel.short_form(), direction.label, config.smem_bytes(), registers,
        resident if infeasible is None else 0 if facts else None, infeasible, built,
    )  # fmt: skip
