"""What an attack found: how often it tried, and what went wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """One kind of attack.

    Attributes:
        name: what was done.
        tried: how often, by what it was done to.
        failures: what went wrong, a line each, with the seed that repeats it.
    """

    name: str
    tried: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {"name": self.name, "tried": dict(self.tried), "failures": self.failures}

    def fail(self, target: str, seed: int, error: object) -> None:
        """Notes that an attempt went wrong."""
        kind = f"{type(error).__name__}: " if isinstance(error, BaseException) else ""
        self.failures.append(f"{self.name} of {target}, seed {seed}: {kind}{error}")


def table(outcomes: list[Outcome]) -> str:
    """A line a target: tried, and the failures of the whole kind under it."""
    lines = [f"{'attack':<14}{'target':<34}{'tried':>8}"]
    for outcome in outcomes:
        lines += [f"{outcome.name:<14}{name:<34}{count:>8}" for name, count in sorted(outcome.tried.items())]
        total = sum(outcome.tried.values())
        lines.append(f"{outcome.name:<14}{'all':<34}{total:>8}   failures: {len(outcome.failures)}")
    return "\n".join(lines)
