"""Predicts how far each method of context parallelism scales, from rates that are in part assumed.

    python benchmarks/simulate_context_parallel.py

Everything it prints is predicted by ``flash_attention.distributed.cost``; no rank runs. A GPU's rates are
those of ``Rates``; across hosts the link is that of a network card, ``--network`` bytes a second a GPU.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from flash_attention.call import Mask
from flash_attention.distributed import Layout, Rates, Schedule
from flash_attention.distributed.cost import Sizes, predict
from flash_attention.distributed.schedule import METHODS, Heads

WORLDS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ON_A_HOST = 8  # GPUs that share a switch


def efficiency(
    method: str, layout: Layout, mask: Mask, heads: Heads, sizes: Sizes, rates: Rates, alone: float
) -> float:
    """The time of one GPU for the whole sequence over the number of ranks times a rank's; both passes."""
    schedule = Schedule(method, layout, mask, heads)  # type: ignore[arg-type]
    seconds = sum(predict(schedule, sizes, rates, backward=b).seconds for b in (False, True))
    return alone / (layout.world * seconds)


def table(
    name: str, tokens_of: dict[int, int], mask: Mask, heads: Heads, network: float, d: int
) -> list[str]:
    """A Markdown table: a row a number of ranks."""
    lines = [
        f"{name}:",
        "",
        "| ranks | tokens | all_gather | ring | ulysses |",
        "| --: | --: | --: | --: | --: |",
    ]
    sizes = Sizes(1, d, d)
    for world, tokens in tokens_of.items():
        rates = Rates() if world <= ON_A_HOST else replace(Rates(), link=network)
        one = Schedule("ring", Layout.zigzag(tokens, 1), mask, heads)
        alone = sum(predict(one, sizes, rates, backward=b).seconds for b in (False, True))
        layout = Layout.zigzag(tokens, world)
        cells = [f"{efficiency(m, layout, mask, heads, sizes, rates, alone):.2f}" for m in METHODS]
        lines.append(f"| {world} | {tokens:,} | {' | '.join(cells)} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", type=float, default=5e10, help="bytes/s of a GPU's network card")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--heads-kv", type=int, default=8)
    parser.add_argument("--d-head", type=int, default=128)
    options = parser.parse_args()
    heads = Heads(options.heads, options.heads_kv)
    causal, window = Mask(None, 0), Mask(4095, 0)
    same = {world: 1 << 20 for world in WORLDS}
    growing = {world: 8192 * world for world in WORLDS}
    for name, tokens, mask in (
        ("Causal, 8,192 tokens a rank", growing, causal),
        ("Causal, 1,048,576 tokens in all", same, causal),
        ("Causal with a window of 4,096, 8,192 tokens a rank", growing, window),
    ):
        print("\n".join(table(name, tokens, mask, heads, options.network, options.d_head)))


if __name__ == "__main__":
    main()
