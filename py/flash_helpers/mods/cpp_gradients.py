"""The part of a mod's struct that is about gradients (``backward``), as C++.

static constexpr bool kScalesGradients;     // whether there is d_score
static constexpr bool kMaskHasHead;         // whether what a query sees depends on the head
static constexpr int kGathered, kLoads;     // captured tensors whose gradients are wanted; loads of them
static constexpr bool kAlongKeys;           // neighbouring threads had better take neighbouring keys
static constexpr flash::mods::Gathered gathered[];                        // one for each of them
static void gradients(captured, …, score, b, h, q, k, add);
    // add(load, tensor, sums, value, indices…) for each element that was loaded; the first two are types
static flash::mods::Tensor<int32_t, 1> scales(captured);
"""

from __future__ import annotations

from flash_helpers.mods.mask_inputs import mask_inputs
from flash_helpers.mods.mod import Mod
from flash_helpers.mods.operations import INDICES
from flash_helpers.mods.stages import Stage, loops, stages

_PASSED = "captured, once, head, row, column, given_score, b_index, h_index, q_index, k_index"


def gradient_lines(mod: Mod, signature: str) -> list[str]:
    """Lines of the struct.

    Args:
        mod: the mod.
        signature: of a result of an element.
    """
    scales = "true" if mod.result("d_score") is not None else "false"
    lines = [
        f"    static constexpr bool kScalesGradients = {scales};",
        f"    static constexpr bool kMaskHasHead = {str(mask_inputs(mod).head).lower()};",
        f"    static constexpr int kGathered = {len(mod.gathered)}, kLoads = {len(mod.gradients)};",
    ]
    if not mod.gathered:
        return lines
    along_keys = "true" if _along_keys(mod) else "false"
    first = len(mod.tensors) - len(mod.gathered) - 1
    return [
        *lines,
        f"    static constexpr bool kAlongKeys = {along_keys};",
        f"    static constexpr flash::mods::Gathered gathered[] = {{{', '.join(_gathered(mod))}}};",
        "    FLASH_HOST_DEVICE static const auto &scales(const Captured &captured) {",
        f"        return captured.t{len(mod.tensors) - 1};",
        "    }",
        "    template <typename Add>",
        f"    FLASH_HOST_DEVICE static void gradients({signature}, const Add &add) {{",
        *(line for i in range(len(mod.gradients)) for line in _load(mod, i, first)),
        "    }",
    ]


def _load(mod: Mod, number: int, first: int) -> list[str]:
    gradient = mod.gradients[number]
    tensor = mod.gathered.index(gradient.slot)
    inside = gradient.length is not None
    passed = f"{_PASSED}, step" if inside else _PASSED
    looped = _looped(mod)
    values = [
        f"{name}({passed if name in looped else _PASSED})" for name in (gradient.value, *gradient.indices)
    ]
    call = (
        f"add(flash::mods::Place<{number}>{{}}, flash::mods::Place<{tensor}>{{}}, "
        f"captured.t{first + tensor}, {', '.join(values)});"
    )
    if not inside:
        return [f"        {call}"]
    return [
        f"        for (int step = 0; step < {gradient.length}; ++step) {{",
        f"            {call}",
        "        }",
    ]


def _looped(mod: Mod) -> set[str]:
    """The results that have a value for each step of a loop."""
    inside = loops(mod)
    return {name for name, place in mod.results if inside[place]}


def _places(mod: Mod, names: tuple[str, ...]) -> list[int]:
    results = dict(mod.results)
    return [results[name] for name in names]


def _along_keys(mod: Mod) -> bool:
    """Whether an index follows the key alone: then elements of neighbouring keys are neighbours."""
    of = stages(mod)
    return any(of[i] is Stage.COLUMN for g in mod.gradients for i in _places(mod, g.indices))


def _gathered(mod: Mod) -> list[str]:
    """Of each tensor how often it is loaded for one score, and which indices of a score are indices of it."""
    found = []
    for slot in mod.gathered:
        own = [g for g in mod.gradients if g.slot == slot]
        loads = sum(g.length or 1 for g in own)
        direct = [{mod.nodes[i].op for i in _places(mod, g.indices)} for g in own]
        flags = ["true" if all(name in ops for ops in direct) else "false" for name in INDICES]
        found.append(f"{{{loads}, {', '.join(flags)}}}")
    return found
