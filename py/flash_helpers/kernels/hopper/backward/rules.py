"""Which choices of a Hopper backward kernel go together."""

from __future__ import annotations

from flash_helpers.kernels.hopper.backward import resources
from flash_helpers.kernels.traits import BackwardTraits

D_HEADS = (64, 96, 128, 192, 256)
ROWS = (64, 128)
DQ_KEYS = (48, 64, 80, 96, 112, 128)
DQ_TILES = ((128, 64), (64, 96), (64, 128))
"""(B_r, d_head) of a step whose dQ two warpgroups share: 64 rows of each, or half of the columns."""


def malformed_reason(config: resources.Fields, traits: BackwardTraits) -> str | None:
    """Why no GPU can run a configuration compiled for some traits, or None."""
    return (
        _sizes_reason(config)
        or _stages_reason(config)
        or _dq_reason(config)
        or _split_reason(config)
        or _registers_reason(config, traits)
        or traits.float_obstacle()
        or _float_obstacle(config, traits)
    )


def _float_obstacle(config: resources.Fields, traits: BackwardTraits) -> str | None:
    if traits.float_query_gradients and config.dq_output == resources.DqOutput.BLOCK_SUMS:
        return (
            "float_query_gradients: with dq_output BLOCK_SUMS the kernel of dK and dV rounds dQ itself; "
            "choose another dq_output"
        )
    return None


def _sizes_reason(config: resources.Fields) -> str | None:
    for name in ("d_head", "d_head_v"):
        if getattr(config, name) not in D_HEADS:
            return (
                f"{name} is {getattr(config, name)}; this family has {', '.join(map(str, D_HEADS))}, others "
                "are padded"
            )
    if config.B_r not in ROWS:
        return f"B_r is {config.B_r}; it must be 64 or 128"
    keys = resources.WARPGROUP_ROWS * (1 if config.split_gradients else resources.CONSUMERS)
    if config.B_c != keys:
        why = "both warpgroups share 64 keys" if config.split_gradients else "each warpgroup owns 64 keys"
        return f"B_c is {config.B_c}; {why}: it must be {keys}"
    return None


def _stages_reason(config: resources.Fields) -> str | None:
    if not 2 <= config.q_stages <= 4:
        return f"q_stages is {config.q_stages}; the next Q is waited for while this one is in use: 2 to 4"
    for name in ("k_stages", "v_stages"):
        if getattr(config, name) not in (1, 2):
            return f"{name} is {getattr(config, name)}; it must be 1 or 2"
    if (size := resources.smem_bytes(config)) > resources.MAX_SMEM_BYTES:
        return (
            f"the tiles of a block take {size} bytes of shared memory; there are {resources.MAX_SMEM_BYTES}"
        )
    return None


def _dq_reason(config: resources.Fields) -> str | None:
    if not config.sums_dq:
        return _own_dq_reason(config)
    if config.dq_B_c:
        return f"dq_B_c is {config.dq_B_c}; only dq_output OWN_KERNEL has a kernel of dQ: it must be 0"
    if (config.B_r, config.d_head) not in DQ_TILES:
        return (
            f"B_r is {config.B_r} and d_head {config.d_head}; each of two warpgroups takes 64 rows and 48 or "
            "64 columns of dQ: B_r of 128 with d_head 64, of 64 with 96 or 128; or choose dq_output "
            "OWN_KERNEL"
        )
    if config.dq_output == resources.DqOutput.BLOCK_SUMS and config.d_head == 96:
        return (
            "dq_output BLOCK_SUMS: the last sum of dQ leaves by 32 columns, and a warpgroup has 48 of 96; "
            "choose another dq_output"
        )
    if config.late_dq and config.k_stages != 2:
        return "late_dq: K of the item before is in use while the next one begins; choose k_stages of 2"
    return None


def _own_dq_reason(config: resources.Fields) -> str | None:
    if config.trimmed:
        return "trimmed: of a block that a warpgroup does not see it computes dQ alone, which has a kernel"
    if config.late_dq:
        return "late_dq: the main kernel computes no dQ where it has a kernel of its own"
    if config.dq_B_c not in DQ_KEYS:
        return f"dq_B_c is {config.dq_B_c}; the kernel of dQ takes {', '.join(map(str, DQ_KEYS))} keys a step"
    if (size := resources.dq_smem_bytes(config)) > resources.MAX_SMEM_BYTES:
        return (
            f"dq_B_c is {config.dq_B_c}: a block of dQ's kernel takes {size} bytes of shared memory; there "
            f"are {resources.MAX_SMEM_BYTES}"
        )
    budget = resources.CONSUMER_REGISTERS[True] - resources.REGISTER_OVERHEAD
    if (registers := resources.dq_resident_registers(config)) > budget:
        return (
            f"dq_B_c is {config.dq_B_c}: dQ, S, dP and dS take {registers} registers a thread; there are "
            f"{budget}, and spilled accumulators let no products overlap"
        )
    return None


def _split_reason(config: resources.Fields) -> str | None:
    if not config.split_gradients:
        return None
    if config.sums_dq:
        return "split_gradients: no warpgroup has registers for dQ; choose dq_output OWN_KERNEL"
    if config.ping_pong:
        return "split_gradients: the warpgroups work on the same step; ping_pong is about turns of two"
    return None


def _registers_reason(config: resources.Fields, traits: BackwardTraits) -> str | None:
    budget = resources.consumer_registers(config) - resources.register_overhead(config)
    registers = resources.resident_registers(config)
    # What dS is made of stays in float32 then.
    if traits.softcap and not config.float_p and not config.split_gradients:
        registers += config.B_r // 2
    if registers > budget:
        return (
            f"the tiles take {registers} registers a thread; there are {budget}, and spilled accumulators "
            "let no products overlap; choose smaller tiles, or P in 16 bits for dS (float_p)"
        )
    return None
