"""The least time that a kernel can take for a problem, by each resource; and which of them bind."""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.kernel import KernelConfig
from flash_helpers.model.step_costs import StepCosts
from flash_helpers.model.work import Work

# Bytes a clock that all SMs together read from the L2 cache. A100: NVIDIA's white paper. An H100 that read a
# third of this rate was at what the profiler calls a third of its peak (2026-11).
L2_BYTES_PER_CLOCK = {(8, 0): 5120, (9, 0): 5120}
L2_BYTES_PER_SM_CLOCK = 64  # elsewhere: what one SM takes

# Bytes a clock that float32 sums in the L2 cache take from all SMs together. An H200 added 3.9 TB/s
# (2026-11), whatever instruction did it. Where nobody has measured it there is no such bound.
ADDED_BYTES_PER_CLOCK = {(9, 0): 2130}

NEAR = 0.05  # bounds this close to the longest one bind as well
MAX_BLOCKS = 2**31 - 1  # of one launch


@dataclass(frozen=True)
class Bound:
    """One resource's least time.

    Attributes:
        name: the resource.
        milliseconds: its least time.
        how: what it is the time of.
    """

    name: str
    milliseconds: float
    how: str


@dataclass(frozen=True)
class Bounds:
    """All bounds of a kernel on a problem, the longest first."""

    all: tuple[Bound, ...]

    @property
    def longest(self) -> float:
        """Milliseconds that no launch of this kernel can beat."""
        return self.all[0].milliseconds

    @property
    def binding(self) -> tuple[Bound, ...]:
        """The longest and those within a few per cent of it."""
        return tuple(bound for bound in self.all if bound.milliseconds >= (1 - NEAR) * self.longest)

    def of(self, name: str) -> float:
        """Milliseconds of one resource."""
        return next(bound.milliseconds for bound in self.all if bound.name == name)

    def text(self) -> str:
        """``shared memory; matrix within 3 %``."""
        first, *others = self.binding
        near = [f"{b.name} within {100 * (1 - b.milliseconds / self.longest):.0f} %" for b in others]
        return "; ".join([first.name, *near])


def bounds(
    config: KernelConfig,
    done: Work,
    costs: StepCosts,
    facts: DeviceFacts,
    blocks_per_sm: int,
    parts: int = 1,
) -> Bounds:
    """The bounds of a piece of work.

    Work that is cut into few blocks keeps few SMs busy: the busiest block counts too.

    Args:
        config: the configuration.
        done: its work.
        costs: of one K/V block.
        facts: the device, whose rates are known.
        blocks_per_sm: resident thread blocks of an SM.
        parts: that the keys are cut into.
    """
    longest = -(-done.longest // parts)
    per_sm = max(done.steps / facts.sm_count, longest)
    clock_ms = 1e3 / facts.clock_hz

    def unit(name: str, clocks: float, how: str) -> Bound:
        return Bound(name, per_sm * clocks * clock_ms, how)

    l2_rate = L2_BYTES_PER_CLOCK.get(facts.capability, L2_BYTES_PER_SM_CLOCK * facts.sm_count)
    chain = max(done.steps / facts.sm_count / max(1, blocks_per_sm), longest)
    shared = f"{costs.shared_memory:,.0f} clocks a K/V block"
    if costs.spill:
        shared += f", {costs.spill:,.0f} of them for spilled registers"
    found = [
        Bound("memory", 1e3 * done.min_bytes / facts.dram_bandwidth, f"{done.min_bytes:,} bytes at least"),
        Bound("L2", done.l2_bytes / l2_rate * clock_ms, f"{done.l2_bytes:,} bytes"),
        unit("matrix", costs.matrix, f"{costs.matrix:,.0f} clocks a K/V block"),
        unit("exp2", costs.exp2, f"{costs.exp2:,.0f} clocks a K/V block"),
        unit("shared memory", costs.shared_memory, shared),
        unit("issue", costs.issue, f"{costs.issue:,.0f} clocks a K/V block"),
        Bound(
            "latency", chain * costs.latency * clock_ms, f"{costs.latency:,.0f} clocks, in a row a K/V block"
        ),
    ]
    if done.added_bytes and (rate := ADDED_BYTES_PER_CLOCK.get(facts.capability)):
        milliseconds = done.added_bytes / rate * clock_ms
        found.append(Bound("global sums", milliseconds, f"{done.added_bytes:,} bytes added to float32"))
    return Bounds(tuple(sorted(found, key=lambda bound: -bound.milliseconds)))


def around(done: Work, facts: DeviceFacts) -> Bound | None:
    """The least time of the kernels before and after the main one, which comes on top of its bounds."""
    if not done.around_bytes:
        return None
    how = f"{done.around_bytes:,} bytes of kernels before and after it"
    return Bound("around the kernel", 1e3 * done.around_bytes / facts.dram_bandwidth, how)


def launch_reason(config: KernelConfig, done: Work) -> str | None:
    """Why one launch can't hold the work, or None; ``attention`` refuses the same."""
    if done.blocks <= MAX_BLOCKS:
        return None
    return (
        f"query blocks of B_r={config.B_r} are {done.blocks} thread blocks; one launch holds {MAX_BLOCKS}: "
        "take a smaller batch, fewer heads or fewer queries"
    )
