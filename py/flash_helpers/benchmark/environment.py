"""What a number was measured on: the card, its state, and the versions of everything involved."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flash_helpers import environment as settings

SMI_FIELDS = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "max_sm_clock_mhz": "clocks.max.sm",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "driver": "driver_version",
}


def environment(device: torch.device) -> dict[str, Any]:
    """The facts that hold for a whole run. Values that cannot be found out are None."""
    facts: dict[str, Any] = {
        "gpu": None,
        "capability": None,
        "sm_count": None,
        "driver": None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "git_commit": git_commit(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["gpu"] = properties.name
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["sm_count"] = properties.multi_processor_count
        facts["cudnn"] = torch.backends.cudnn.version()
        facts["driver"] = _query_smi(device).get("driver")
    else:
        facts["gpu"] = "cpu"
    return facts


def gpu_state(device: torch.device) -> dict[str, Any]:
    """Clocks (MHz), temperature (C), power and its limit (W) now; empty on the CPU."""
    if device.type != "cuda":
        return {}
    state = _query_smi(device)
    state.pop("driver", None)
    return state


@cache
def git_commit() -> str | None:
    """The commit of this checkout, with ``-dirty`` when files differ from it; None outside one.

    ``FLASH_ATTENTION_COMMIT`` says it where the sources came without their git folder.
    """
    if given := settings.commit():
        return given
    root = Path(__file__).resolve().parents[3]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _query_smi(device: torch.device) -> dict[str, Any]:
    """One nvidia-smi query of this device, by UUID since CUDA may number devices differently."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    index = device.index if device.index is not None else torch.cuda.current_device()
    which = f"GPU-{uuid}" if uuid is not None else str(index)
    command = ["nvidia-smi", "-i", which, f"--query-gpu={','.join(SMI_FIELDS.values())}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [text.strip() for text in done.stdout.strip().splitlines()[0].split(",")]
    return {name: _number(text) for name, text in zip(SMI_FIELDS, values, strict=False)}


def _number(text: str) -> Any:
    """A float where the text is one, None for ``[N/A]``, else the text (a driver version)."""
    if text.count(".") > 1:
        return text
    try:
        return float(text)
    except ValueError:
        return None if text.startswith("[") else text
