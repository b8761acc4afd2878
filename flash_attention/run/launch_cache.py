"""Calls that were made before: the short way from a call to its launch.

Checks, choice and arguments of a launch depend on a call's options and on the layouts of its tensors alone. A
call that went the long way is remembered by them, and the next one like it is launched without asking again;
see ``src/binding/call_table.hpp`` for what is still looked at. Whatever is not known, or not as it was, takes
the long way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flash_attention.devices import backend
from flash_attention.mods.remembered import matched
from flash_attention.mods.tracing import Traced
from flash_attention.torch_private import forward_levels
from flash_helpers import generation
from flash_helpers.kernels.kernel import Kernel, KernelConfig
from flash_helpers.kernels.problem import BACKWARD, FORWARD

if TYPE_CHECKING:
    from flash_attention.backends.cuda import Launched

MAX_TABLES = 256  # sets of options; each table holds at most 256 layouts
_CONSTANTS = (
    str,
    bool,
    int,
    float,
    tuple,
    type(None),
    torch.dtype,
)  # types of options that stay what they are

Key = tuple[Any, ...]  # a call's name and options

# With each table its function `call`, which the binding makes anew whenever it is asked for, and the
# configurations whose ids are in its key: while the key is known, no others can have these ids.
_tables: dict[Key, tuple[Any, Any, tuple[KernelConfig | None, ...]]] = {}
_latest: Any = None  # the table that the latest call of `attention` was found in, or its kernel


def repeat(key: Key, *given: Any) -> Any:
    """Makes a call that was made before.

    Args:
        key: the call's name and options, a configuration by its ``id``.
        given: (q, k, v, out, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, seqused_q,
            numbers …, what is compared of functions …), the last may lack.

    Returns:
        The call's result, or None: it has to go the long way.
    """
    global _latest
    try:
        found = _tables.get(key)
    except TypeError:  # an option that cannot be hashed
        return None
    if found is None or forward_levels._current_level >= 0:  # tangents are asked for by the checks alone
        return None
    result = found[1](*given)
    if result is not None:
        _latest = found[0]
    return result


# What functions of scores and masks are to a remembered call: what they add to its key, what they add to what
# is compared of it (``Known.match``), and the mod with its numbers, without its tensors.
Mods = tuple[Key, tuple[Any, ...], Traced | None]

NO_MODS: Mods = ((), (), None)
NO_LAYOUT = (None,) * 5  # tensors of a layout, of a call that has none


def mods_of(score_mod: Any, mask_mod: Any) -> Mods | None:
    """See ``Mods``. None: the functions are not known, or their call cannot be remembered."""
    found = matched(score_mod, mask_mod)
    return None if found is None or found[1] is None else found


def captured_of(compared: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The captured tensors among what is compared of a call."""
    return compared[1:] if compared and type(compared[0]) is tuple else compared


def behind(slots: tuple[Any, ...], compared: tuple[Any, ...]) -> tuple[Any, ...]:
    """What ``repeat`` is given behind a call's own tensors.

    Args:
        slots: of its layout.
        compared: of the functions of the user's.
    """
    if not compared:
        return slots
    return (*(slots or NO_LAYOUT), *compared)


def with_lse(key: Key) -> Key:
    """The key of the same call with ``return_lse=True``, which the backward pass needs."""
    return (*key[:5], True, *key[6:])


def of_gradients(key: Key, dq: bool, dk: bool, dv: bool, deterministic: bool) -> Key:
    """The key of a call's backward pass.

    Args:
        key: of the call.
        dq, dk, dv: which gradients are wanted.
        deterministic: they have to be the same bits in every run.
    """
    return (BACKWARD, dq, dk, dv, deterministic, *key)


def repeat_gradients(key: Key, *given: Any) -> Any:
    """``repeat`` for a backward pass, which ``last_kernel`` does not tell of.

    Args:
        key: see ``of_gradients``.
        given: (q, k, v, out, lse, dout, dlse, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, seqused_q,
            numbers …, captured tensors …), the last may lack.

    Returns:
        (dq, dk, dv, workspace), each None where it is not wanted; or None: it has to go the long way.
    """
    found = _tables.get(key)
    if found is None or forward_levels._current_level >= 0:
        return None
    return found[1](*given)


def repeat_forward(kernel_cfg: KernelConfig, q: Tensor, k: Tensor, v: Tensor, o: Tensor | None) -> Any:
    """``repeat`` for ``forward``, which ``last_kernel`` does not tell of."""
    found = _tables.get((id(kernel_cfg),))
    if found is None or forward_levels._current_level >= 0:
        return None
    return found[1](q, k, v, o)


def remember(
    key: Key,
    given: tuple[Any, ...],
    configs: tuple[KernelConfig | None, ...],
    kernel: Kernel,
    launched: Launched,
    made: tuple[Tensor | None, ...],
    chosen_in: int | None = None,
    direction: str = FORWARD,
    kept: Any = None,
) -> None:
    """Remembers a call that was just launched, if a launch on its own tensors is all there is to it.

    Args:
        key, given: as ``repeat`` will be asked.
        configs: those whose ``id`` may be in the key.
        kernel: what ran.
        launched: its launch.
        made: out, lse and workspace, as far as they were made for the call; of a backward pass dq, dk, dv and
            workspace.
        chosen_in: the generation that chose the kernel; None: the caller named it.
        direction: the pass.
        kept: what else the launch reads, which has to live as long as it may be made again.
    """
    if not all(type(option) in _CONSTANTS for option in key):
        return
    cuda = backend("cuda")
    makers = tuple(None if x is None else cuda.maker_like(x) for x in made)
    with generation.lock:
        if chosen_in not in (None, generation.number()):
            return
        found = _tables.get(key)
        if found is None:
            if len(_tables) >= MAX_TABLES:
                forget()
            table = cuda.call_table(direction)
            found = _tables[key] = (table, table.call, configs)
        device = given[0].get_device()
        told = given, made, makers, launched.launch, launched.arguments, device, kernel
        found[0].remember(*told, *(() if kept is None else (kept,)))


@generation.forgets
def forget() -> None:
    """Forgets all calls: choices may differ from now on."""
    _tables.clear()


def set_last_kernel(kernel: Kernel) -> None:
    """A call on the long way has run this kernel."""
    global _latest
    _latest = kernel


def last_kernel() -> Kernel | None:
    """See ``flash_attention.last_kernel``."""
    return _latest if _latest is None or isinstance(_latest, Kernel) else _latest.last
