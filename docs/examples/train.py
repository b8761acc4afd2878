"""Trains a small GPT and a small encoder with eager attention, PyTorch's and this library's, and compares.

    python docs/examples/train.py --steps 300 --json training.json --figure training.svg

The language is made: each symbol follows the two before it by a table of chances, and the last stretch of a
sequence repeats an earlier one, which only attention can foretell. The GPT predicts the next symbol: causal
attention, grouped heads. The encoder predicts symbols that were masked, in sequences of different lengths:
eager attention and PyTorch's see a padded batch with a mask, this library sees packed sequences.

Weights and batches follow from the seed alone, so that curves of one seed differ by the attention alone.
Eager attention runs with several seeds: how far its own curves are apart is what the others are held against.
With ``deterministic=True``, this library's first run is repeated: all bits of the losses have to come again.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch's products are repeatable with it

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from flash_attention import attention, attention_varlen

SYMBOLS, MASKED = 32, 0
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        name: ``gpt`` or ``encoder``.
        layers, width, heads, heads_kv: of the model; a head has width / heads columns.
        batch, length: sequences of a step, and symbols of the longest.
        steps: how many.
        rate: of learning, at its peak.
    """

    name: str
    layers: int = 4
    width: int = 256
    heads: int = 4
    heads_kv: int = 2
    batch: int = 16
    length: int = 256
    steps: int = 300
    rate: float = 1e-3

    @property
    def causal(self) -> bool:
        return self.name == "gpt"


# ---------------------------------------------------------------------- data
class Language:
    """Sequences that follow from a seed: the same on every device and in every process."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(1000 + seed)
        table = torch.Generator().manual_seed(7)  # one language for all seeds
        self.followers = torch.randint(1, SYMBOLS, (SYMBOLS, SYMBOLS, 4), generator=table)

    def batch(self, items: int, length: int) -> Tensor:
        """(items, length) int64."""
        x = torch.randint(1, SYMBOLS, (items, length), generator=self.generator)
        which = torch.randint(4, (items, length), generator=self.generator)
        fresh = torch.rand(items, length, generator=self.generator) < 0.05
        for i in range(2, length):
            follower = self.followers[x[:, i - 2], x[:, i - 1], which[:, i]]
            x[:, i] = torch.where(fresh[:, i], x[:, i], follower)
        third = length // 3
        for item in range(items):  # the last stretch repeats an earlier one
            begin = int(torch.randint(third, (1,), generator=self.generator))
            x[item, -third:] = x[item, begin : begin + third]
        return x

    def lengths(self, items: int, length: int) -> Tensor:
        """Of the sequences of a batch, from half to the whole; one has the whole."""
        lengths = torch.randint(length // 2, length + 1, (items,), generator=self.generator)
        lengths[0] = length
        return lengths

    def masks(self, shape: torch.Size) -> Tensor:
        return torch.rand(shape, generator=self.generator) < 0.15


# ---------------------------------------------------------------------- attention
def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool, padding: Tensor | None) -> Tensor:
    """(batch, seq, heads, d) in and out."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None], float("-inf"))
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def pytorch(q: Tensor, k: Tensor, v: Tensor, causal: bool, padding: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = None if padding is None else ~padding[:, None, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True).transpose(
        1, 2
    )


def ours(deterministic: bool) -> Attend:
    """This library. Sequences of the encoder are packed one behind the other, with no row for padding."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, padding: Tensor | None) -> Tensor:
        if padding is None:
            return attention(q, k, v, causal=causal, deterministic=deterministic)
        tokens = ~padding
        offsets = nn.functional.pad(tokens.sum(1).cumsum(0), (1, 0)).int()
        longest = q.shape[1]
        rows = attention_varlen(
            q[tokens], k[tokens], v[tokens], offsets, offsets, longest, longest, deterministic=deterministic
        )
        return torch.zeros_like(q).index_put((tokens,), rows)

    return attend


# ---------------------------------------------------------------------- model
class Block(nn.Module):
    """A layer of a transformer: attention and a perceptron, each behind a normalization."""

    def __init__(self, task: Task, attend: Attend) -> None:
        super().__init__()
        self.task, self.attend, d = task, attend, task.width // task.heads
        self.before, self.between = nn.LayerNorm(task.width), nn.LayerNorm(task.width)
        self.q = nn.Linear(task.width, task.width)
        self.kv = nn.Linear(task.width, 2 * task.heads_kv * d)
        self.out = nn.Linear(task.width, task.width)
        self.perceptron = nn.Sequential(
            nn.Linear(task.width, 4 * task.width), nn.GELU(), nn.Linear(4 * task.width, task.width)
        )

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        y, task = self.before(x), self.task
        q = self.q(y).unflatten(-1, (task.heads, -1))
        k, v = self.kv(y).unflatten(-1, (2, task.heads_kv, -1)).unbind(2)
        x = x + self.out(self.attend(q, k, v, task.causal, padding).flatten(2))
        return x + self.perceptron(self.between(x))


class Model(nn.Module):
    """Symbols in, logits of symbols out."""

    def __init__(self, task: Task, attend: Attend) -> None:
        super().__init__()
        self.symbols = nn.Embedding(SYMBOLS, task.width)
        self.places = nn.Embedding(task.length, task.width)
        self.blocks = nn.ModuleList([Block(task, attend) for _ in range(task.layers)])
        self.norm, self.out = nn.LayerNorm(task.width), nn.Linear(task.width, SYMBOLS)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        y = self.symbols(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            y = block(y, padding)
        return self.out(self.norm(y))


# ---------------------------------------------------------------------- training
Batch = tuple[Tensor, ...]  # symbols; of the encoder also what is padding, what is asked for, what is shown


@lru_cache(1)
def batches(task: Task, seed: int) -> list[Batch]:
    """Those of all steps, made at once."""
    language = Language(seed)
    x = language.batch(task.steps * task.batch, task.length)
    if task.causal:
        return [(some,) for some in x.split(task.batch)]
    lengths = torch.cat([language.lengths(task.batch, task.length) for _ in range(task.steps)])
    padding = torch.arange(task.length) >= lengths[:, None]
    asked = language.masks(x.shape) & ~padding
    shown = x.masked_fill(asked, MASKED)
    return list(zip(*(y.split(task.batch) for y in (x, padding, asked, shown)), strict=True))


def loss_of(model: Model, batch: Batch) -> Tensor:
    """Of one batch."""
    x, *masks = batch
    if not masks:
        return cross_entropy(model(x[:, :-1]).float().flatten(0, 1), x[:, 1:].flatten())
    padding, asked, shown = masks
    return cross_entropy(model(shown, padding)[asked].float(), x[asked])


def train(task: Task, attend: Attend, seed: int, device: str) -> tuple[list[float], float]:
    """The loss of each step, and the median time of a step in milliseconds."""
    torch.manual_seed(seed)
    model = Model(task, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, weight_decay=0.1)
    warm = max(1, task.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    losses, times = [], []
    for batch in batches(task, seed):
        begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model, tuple(x.to(device) for x in batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item())
        times.append(1e3 * (time.perf_counter() - begin))
    return losses, sorted(times)[len(times) // 2]


def smoothed(losses: list[float], over: int) -> list[float]:
    """Means over the last so many steps."""
    return [sum(losses[max(0, i + 1 - over) : i + 1]) / min(over, i + 1) for i in range(len(losses))]


def distance(a: list[float], b: list[float], over: int) -> float:
    """How far two curves are apart at most, smoothed."""
    return max(abs(x - y) for x, y in zip(smoothed(a, over), smoothed(b, over), strict=True))


def compare(task: Task, seeds: int, device: str) -> dict[str, Any]:
    """Trains a task in every way; the curves, times and distances."""
    ways = {"eager": eager, "pytorch": pytorch, "attention": ours(False)}
    curves: dict[str, list[list[float]]] = {}
    milliseconds: dict[str, float] = {}
    for seed in range(seeds):  # all ways see the batches of one seed one after the other
        for name, attend in ways.items():
            losses, ms = train(task, attend, seed, device)
            print(
                f"{task.name}, seed {seed}: {name} ends at {losses[-1]:.3f}, {ms:.1f} ms a step", flush=True
            )
            curves.setdefault(name, []).append(losses)
            milliseconds[name] = min(ms, milliseconds.get(name, ms))
    over = max(1, task.steps // 20)
    pairs = [(i, j) for i in range(seeds) for j in range(i)]
    torch.use_deterministic_algorithms(True)
    again = [train(task, ours(True), 0, device)[0] for _ in range(2)]
    torch.use_deterministic_algorithms(False)
    return {
        "losses": curves,
        "milliseconds_per_step": milliseconds,
        "spread_of_eager": max(distance(curves["eager"][i], curves["eager"][j], over) for i, j in pairs),
        "distance_from_eager": {
            name: max(distance(curves[name][seed], curves["eager"][seed], over) for seed in range(seeds))
            for name in ("pytorch", "attention")
        },
        "deterministic_runs_are_equal": again[0] == again[1],
    }


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """The curves of the first seed, and all of eager attention's as a band."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 3.2))
    axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axis, (name, result) in zip(axes, results.items(), strict=True):
        over = max(1, len(result["losses"]["eager"][0]) // 20)
        band = [smoothed(losses, over) for losses in result["losses"]["eager"]]
        steps = range(len(band[0]))
        axis.fill_between(
            steps, list(map(min, *band)), list(map(max, *band)), alpha=0.3, label="eager, all seeds"
        )
        for way, curves in result["losses"].items():
            axis.plot(steps, smoothed(curves[0], over), label=way, linewidth=1.2)
        axis.set_title(name, loc="left")
        axis.set_xlabel("step")
    figure.axes[0].set_ylabel("loss")
    figure.axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> int:
    """Trains, writes, and says whether all curves lie within the spread of eager attention's own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3, help="at least 2")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tasks", nargs="+", choices=("gpt", "encoder"), default=["gpt", "encoder"])
    parser.add_argument("--json", type=Path, help="a result file to write")
    parser.add_argument("--figure", type=Path, help="a drawing of the curves to write")
    given = parser.parse_args(arguments)
    if given.seeds < 2:
        parser.error(f"--seeds is {given.seeds}; the spread of eager attention takes at least 2")
    results, right = {}, True
    for name in given.tasks:
        task = Task(
            name, given.layers, given.width, steps=given.steps, length=given.length, batch=given.batch
        )
        result = results[name] = compare(task, given.seeds, given.device)
        spread, apart = result["spread_of_eager"], result["distance_from_eager"]
        last = {way: sum(c[-1] for c in curves) / len(curves) for way, curves in result["losses"].items()}
        print(f"{name}: last losses {', '.join(f'{way} {loss:.3f}' for way, loss in last.items())}")
        print(
            f"  eager attention's own seeds are up to {spread:.4f} apart; of one seed, from eager attention:"
        )
        print(f"  PyTorch's {apart['pytorch']:.4f}, this library's {apart['attention']:.4f}")
        print(f"  with deterministic=True two runs are equal: {result['deterministic_runs_are_equal']}")
        right = right and apart["attention"] <= spread and result["deterministic_runs_are_equal"]
    if given.json:
        from flash_helpers.benchmark.environment import environment
        from flash_helpers.benchmark.result_file import ResultFile

        what = "losses of a small GPT and a small encoder, trained with three implementations of attention"
        method = (
            "weights and batches follow from the seed; curves are compared as means over a 20th of the steps"
        )
        facts = {"settings": {k: v for k, v in vars(given).items() if k not in ("json", "figure")}, **results}
        ResultFile(
            "training",
            what,
            environment=environment(torch.device(given.device)),
            facts=facts,
            direction="backward",
            method=method,
        ).save(given.json)
    if given.figure:
        draw(results, given.figure)
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
