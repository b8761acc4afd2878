"""The command line ``flash-attention``. Each command is a thin layer over a plain function.

Nothing heavy is imported before a command needs it: ``flash-attention --help`` starts at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Kernels as data: measure, tune, explain, build.",
)

USER_ERRORS = (ValueError, OSError, RuntimeError, ModuleNotFoundError)


@contextmanager
def shown_errors() -> Iterator[None]:
    """A user's mistake ends the program with its message and status 2, without a traceback."""
    try:
        yield
    except USER_ERRORS as error:
        if type(error) is RuntimeError:
            raise  # our errors are subclasses: this is a defect, and its traceback is wanted
        Console(stderr=True).print(
            f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        raise typer.Exit(2) from error


def integers(text: str) -> list[int]:
    """Reads numbers joined by commas.

    Raises:
        ValueError: a part is no number.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r} is no list of whole numbers joined by commas, such as 512,1024") from None


@app.callback()
def flash_attention() -> None:
    """Kernels as data: measure, tune, explain, build."""


@app.command()
def bench(
    seq_lens: Annotated[
        str, typer.Argument(help="queries and keys, joined by commas")
    ] = "512,1024,2048,4096",
    d_heads: Annotated[str, typer.Argument(help="head sizes, joined by commas")] = "64,128",
    kernels: Annotated[
        str, typer.Option(help="all, ladder, tune, 'B_r,B_c', none, or short forms joined by ;")
    ] = "ladder",
    peers: Annotated[str, typer.Option(help="names joined by commas, all, default or none")] = "default",
    dtype: Annotated[str, typer.Option(help="names joined by commas")] = "fp16",
    causal: Annotated[str, typer.Option(help="no, yes or both")] = "no",
    batch: Annotated[int, typer.Option(help="0: so that batch * seq_len is 16384")] = 0,
    heads: Annotated[int, typer.Option(help="0: so that heads * d_head is 2048")] = 0,
    rounds: Annotated[int, typer.Option("--rounds", "--n-runs", "--n_runs")] = 11,
    modes: Annotated[str, typer.Option(help="out of hot,paused,cold,graph,call,host")] = "hot,paused",
    automatic: Annotated[bool, typer.Option(help="time attention() too")] = False,
    json: Annotated[Path | None, typer.Option(help="write a result file")] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, cpu; default: the GPU if there is one")
    ] = None,
) -> None:
    """Time kernels beside the best peers: checked first, in one process, in random order."""
    with shown_errors():
        from flash_helpers.benchmark.command import bench_command

        bench_command(
            integers(seq_lens), integers(d_heads), dtype, causal, batch, heads, kernels, peers, rounds,
            modes.split(","), automatic, json, device,
        )  # fmt: skip


@app.command()
def explain(
    kernel: Annotated[str, typer.Argument(help="a kernel's short form")],
    diff: Annotated[str | None, typer.Option(help="compare with this short form")] = None,
    device: Annotated[
        str, typer.Option(help="A100, RTX3090, RTX4090, H100, several by commas, or all")
    ] = "H100",
    batch: int = 16,
    heads: int = 16,
    seq_len: int = 4096,
    causal: bool = False,
    compile_it: Annotated[bool, typer.Option("--compile/--no-compile", help="ask the compiler too")] = False,
    json: Annotated[Path | None, typer.Option(help="write the explanation")] = None,
) -> None:
    """Resources, floors, bank conflicts, instructions and rejected neighbours of a kernel; needs no GPU."""
    with shown_errors():
        from flash_helpers.explain.command import explain_command

        explain_command(kernel, diff, device, batch, heads, seq_len, causal, compile_it, json)


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="result files of one card")],
    out: Annotated[Path, typer.Option(help="folder to write to")] = Path("report"),
    mode: Annotated[str, typer.Option(help="hot, paused, cold, graph or call")] = "hot",
    readme: Annotated[Path | None, typer.Option(help="fill the marked tables of this file too")] = None,
) -> None:
    """One self-contained HTML page and figures from result files."""
    with shown_errors():
        from flash_helpers.report.command import write_report
        from flash_helpers.report.data import load_report
        from flash_helpers.report.readme import update_readme

        for path in write_report(results, out, mode):
            typer.echo(path)
        if readme is not None:
            changed = update_readme(readme, load_report(results, mode))
            typer.echo(f"{readme}: {'tables updated' if changed else 'already up to date'}")


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
