"""A mod of soft-capped scores: kernels with a mod have no soft cap of their own."""

from __future__ import annotations

from functools import lru_cache

from flash_helpers.mods.builder import Builder
from flash_helpers.mods.mod import Mod, Number


@lru_cache(256)
def capped(mod: Mod) -> Mod:
    """The mod with a soft cap before it: ``mod(cap * tanh(score / cap))``.

    The cap is one more captured number, the last one.
    """
    builder = Builder((*mod.numbers, Number.REAL), mod.tensors)
    cap = builder.number(len(mod.numbers))
    given = builder.leaf("score")
    score = builder.apply("mul", cap, builder.apply("tanh", builder.apply("divide", given, cap)))
    places = builder.copy(mod, score=score)
    results = {name: places[place] for name, place in mod.results}
    results.setdefault("score", score)
    return builder.finish(results, all_captured=True)
