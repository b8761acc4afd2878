"""The command line ``flash-attention``. Each command is a thin layer over a plain function.

Nothing heavy is imported before a command needs it: ``flash-attention --help`` starts at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import flash_helpers
from flash_helpers.commands.examples import examples
from flash_helpers.console.errors import shown_errors
from flash_helpers.console.output import use_plain
from flash_helpers.console.pipe import patient_output

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help without boxes: it can be piped, searched and copied
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Kernels as data: measure, tune, explain, build.",
)

JSON_HELP = "write the outcome to this file; -: to standard output"
SETS_HELP = (
    "all, ampere, hopper, ampere_backward, hopper_backward, tune, ladder, hopper_ladder, 'B_r,B_c', or short "
    "forms joined by ;"
)

Plain = Annotated[
    bool,
    typer.Option(
        "--plain",
        callback=use_plain,
        help="tables as lines, one a row, nothing cut; so they are wherever the output is no terminal",
    ),
]


Direction = Annotated[
    str, typer.Option(help="forward, or backward: the gradients, of peers by autograd; FLOP are 2.5 times")
]


def integers(text: str, name: str) -> list[int]:
    """Reads numbers joined by commas.

    Args:
        text: what was given.
        name: the argument, for the message.

    Raises:
        ValueError: a part is no number.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{name} is {text!r}; it must be whole numbers joined by commas, such as 512,1024"
        ) from None


def show_version(wanted: bool) -> None:
    """Prints the version and ends the program; the callback of ``--version``."""
    if wanted:
        typer.echo(f"flash-attention-kernels {flash_helpers.__version__}")
        raise typer.Exit


@app.callback()
def flash_attention(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Kernels as data: measure, tune, explain, build."""


@app.command(epilog=examples("bench"), short_help="Time kernels beside the best peers, in one process.")
def bench(
    seq_lens: Annotated[
        str, typer.Argument(help="queries and keys, joined by commas")
    ] = "512,1024,2048,4096",
    d_heads: Annotated[str, typer.Argument(help="head sizes, joined by commas")] = "64,128",
    kernels: Annotated[
        str,
        typer.Option(
            help=f"attention: what it chooses; tuned: the best of each tuned bucket; none; {SETS_HELP}"
        ),
    ] = "attention",
    peers: Annotated[str, typer.Option(help="names joined by commas, all, default or none")] = "default",
    dtype: Annotated[str, typer.Option(help="names joined by commas")] = "fp16",
    causal: Annotated[str, typer.Option(help="no, yes or both")] = "no",
    batch: Annotated[int, typer.Option(help="0: so that batch * seq_len is 16384; on the CPU 4096")] = 0,
    heads: Annotated[int, typer.Option(help="0: so that heads * d_head is 2048; on the CPU 512")] = 0,
    rounds: Annotated[int, typer.Option("--rounds", "--n-runs", "--n_runs")] = 11,
    modes: Annotated[str, typer.Option(help="out of hot,paused,cold,graph,call,host")] = "hot,paused",
    automatic: Annotated[bool, typer.Option(help="time attention() too")] = False,
    json: Annotated[
        Path | None, typer.Option(help="write a result file, for report; -: to standard output")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, cpu; default: the GPU if there is one")
    ] = None,
    direction: Direction = "forward",
    plain: Plain = False,
) -> None:
    """Time kernels beside the best peers: checked first, in one process, in random order."""
    with shown_errors():
        from flash_helpers.benchmark.command import bench_command
        from flash_helpers.benchmark.ending import end_with

        results = bench_command(
            integers(seq_lens, "seq_lens"), integers(d_heads, "d_heads"), dtype, causal, batch, heads,
            kernels, peers, rounds, modes.split(","), automatic, json, device, direction=direction,
        )  # fmt: skip
        end_with(results.file())


@app.command(
    epilog=examples("explain"), short_help="A kernel or a problem: resources, bounds, what is chosen."
)
def explain(
    kernel: Annotated[
        str | None, typer.Argument(help="a kernel's short form; none: what the problem below gets, and why")
    ] = None,
    diff: Annotated[str | None, typer.Option(help="compare with this short form")] = None,
    device: Annotated[
        str, typer.Option(help="A100, RTX3090, RTX4090, H100, H200, several by commas, or all")
    ] = "H100",
    batch: int = 16,
    heads: int = 16,
    heads_kv: Annotated[int, typer.Option(help="heads of K and V; 0: as many as heads")] = 0,
    seq_len: Annotated[int, typer.Option(help="queries")] = 4096,
    seq_len_k: Annotated[int, typer.Option(help="keys, of a cache its capacity; 0: as many as queries")] = 0,
    causal: bool = False,
    window: Annotated[
        str, typer.Option(help="LEFT,RIGHT: keys seen before and after a query's own place; all: no limit")
    ] = "",
    softcap: Annotated[bool, typer.Option("--softcap", help="scores are soft-capped")] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="each head has a sink")] = False,
    varlen: Annotated[bool, typer.Option("--varlen", help="packed sequences, all of this length")] = False,
    cached: Annotated[bool, typer.Option("--cached", help="keys are in a cache of seq_len_k")] = False,
    paged: Annotated[bool, typer.Option("--paged", help="in one of pages")] = False,
    page_size: Annotated[
        int, typer.Option(help="with --paged: rows of a page; 0: a multiple of 16, which all kernels take")
    ] = 0,
    planned: Annotated[
        bool, typer.Option("--planned", help="queries over the cache are packed: attention_varlen")
    ] = False,
    lse: Annotated[bool, typer.Option("--lse", help="the log-sum-exp is wanted")] = False,
    direction: Annotated[
        str | None,
        typer.Option(help="of a problem: forward, the default, or backward; a kernel has its own"),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="of gradients: the same bits in every run")
    ] = False,
    numerics: Annotated[
        str, typer.Option(help="of a problem: invariant: by kernels of one numeric class; fast: by any")
    ] = "fast",
    split: Annotated[bool, typer.Option("--split", help="of a kernel: keys are cut into parts")] = False,
    dtype: Annotated[
        str | None, typer.Option(help="of a problem, default bf16; a kernel has its own")
    ] = None,
    d_head: Annotated[
        int | None, typer.Option(help="of a problem, default 128; a kernel has its own")
    ] = None,
    d_head_v: Annotated[int, typer.Option(help="of V and O; 0: d_head; a kernel has its own")] = 0,
    compile_it: Annotated[bool, typer.Option("--compile/--no-compile", help="ask the compiler too")] = False,
    ncu: Annotated[
        bool, typer.Option("--ncu", help="run the kernel on this machine's GPU and show its counters")
    ] = False,
    model_error: Annotated[
        bool, typer.Option("--model-error", help="print how far predictions are off, and nothing else")
    ] = False,
    results: Annotated[
        list[Path] | None, typer.Option(help="with --model-error: result files; default: the project's own")
    ] = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP)] = None,
    plain: Plain = False,
) -> None:
    """A kernel: resources, bounds, instructions. A problem: what it gets, and why. Needs no GPU."""
    with shown_errors():
        from flash_helpers.explain.asked import Asked, parse_window
        from flash_helpers.explain.command import explain_command, explain_problem_command

        if model_error:
            from flash_helpers.explain.model_error import model_error_command

            if kernel is not None:
                raise ValueError("--model-error is about all kernels: leave the kernel away")
            model_error_command(results or (), json)
            return
        if results:
            raise ValueError("--results belongs to --model-error: add it, or leave --results away")
        asked = Asked(
            batch, heads, seq_len, heads_kv, seq_len_k, d_head_v, causal, parse_window(window),
            softcap, sinks, lse, varlen, cached, paged, direction or "forward", deterministic, numerics,
            page_size, planned,
        )  # fmt: skip
        if kernel is None:
            of_kernels = {"--diff": diff is not None, "--compile": compile_it, "--split": split, "--ncu": ncu}
            for name, given in of_kernels.items():
                if given:
                    raise ValueError(f"{name} is about a kernel: name it first, explain KERNEL {name}")
            explain_problem_command(
                device,
                "bf16" if dtype is None else dtype,
                128 if d_head is None else d_head,
                json_path=json,
                asked=asked,
            )
            return
        if numerics != "fast":
            raise ValueError(
                "--numerics asks which kernel a problem gets: leave it away, or leave the kernel away"
            )
        for name, value in (("--dtype", dtype), ("--d-head", d_head), ("--direction", direction)):
            if value is not None:
                raise ValueError(
                    f"{name} is {value}, and the kernel has its own: leave {name} away, or leave the kernel, "
                    f"{kernel!r}, away to see what a problem gets"
                )
        explain_command(
            kernel, diff, device, compile_it=compile_it, json_path=json, asked=asked, split=split, ncu=ncu
        )


@app.command(epilog=examples("tune"), short_help="Find the fastest kernels on this card and remember them.")
def tune(
    seq_lens: Annotated[
        str, typer.Argument(help="queries, and keys unless --keys says others, joined by commas")
    ] = "512,1024,2048,4096,8192,16384",
    d_heads: Annotated[str, typer.Argument(help="head sizes, joined by commas")] = "64,128",
    dtype: Annotated[str, typer.Option(help="names joined by commas")] = "fp16,bf16",
    causal: Annotated[str, typer.Option(help="no, yes or both")] = "both",
    batch: Annotated[int, typer.Option(help="0: so that batch * seq_len is 16384")] = 0,
    heads: Annotated[int, typer.Option(help="0: so that heads * d_head is 2048")] = 0,
    kernels: Annotated[str, typer.Option(help="tune: all families' spaces; or as in bench")] = "tune",
    budget: Annotated[float | None, typer.Option(help="seconds for everything; 0: measure nothing")] = None,
    jobs: Annotated[int | None, typer.Option(help="compilations at the same time")] = None,
    fresh: Annotated[bool, typer.Option(help="measure again what is known")] = False,
    keys: Annotated[
        str, typer.Option(help="numbers of keys, joined by commas; default: as many keys as queries")
    ] = "",
    device: Annotated[str, typer.Option(help="cuda, cuda:1")] = "cuda",
    export: Annotated[
        Path | None, typer.Option(help="write the table of this card to this file or folder, in the end")
    ] = None,
    direction: Direction = "forward",
    json: Annotated[Path | None, typer.Option(help=JSON_HELP)] = None,
    plain: Plain = False,
) -> None:
    """Find the fastest kernel of each kind of problem and remember it; resumes where it was stopped."""
    with shown_errors():
        from flash_helpers.tune.command import tune_command

        tune_command(
            integers(seq_lens, "seq_lens"), integers(d_heads, "d_heads"), dtype, causal, batch, heads,
            kernels, budget, jobs, fresh, device, export, json, direction=direction,
            keys=integers(keys, "keys") if keys else (),
        )  # fmt: skip


@app.command(epilog=examples("ladder"))
def ladder(
    out: Annotated[Path, typer.Option(help="folder of the results and the report")] = Path("ladder"),
    family: Annotated[
        str, typer.Option(help="ampere, hopper, ampere_backward, hopper_backward or all")
    ] = "ampere",
    dtype: str = "bf16",
    d_heads: Annotated[str, typer.Option("--d-head", help="out of 64,128,256")] = "128",
    seq_lens: Annotated[
        str | None,
        typer.Option("--seq-len", help="lengths joined by commas; default: 4096, on the CPU 256"),
    ] = None,
    causal: Annotated[str, typer.Option(help="no, yes or both")] = "no",
    batch: Annotated[int, typer.Option(help="0: so that batch * seq_len is 16384; on the CPU 256")] = 0,
    heads: Annotated[int, typer.Option(help="0: so that heads * d_head is 2048; on the CPU 512")] = 0,
    peers: Annotated[
        str, typer.Option(help="names joined by commas, all, default or none")
    ] = "fa2,cudnn,sdpa-cpu",
    rounds: int = 11,
    device: Annotated[str | None, typer.Option(help="default: the GPU if there is one")] = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP)] = None,
    plain: Plain = False,
) -> None:
    """Run the steps of optimisation side by side and write the report."""
    with shown_errors():
        from flash_helpers.benchmark.ending import end_with
        from flash_helpers.benchmark.result_file import ResultFile
        from flash_helpers.commands.ladder import RESULT_FILE, ladder_command

        ladder_command(
            out, family, dtype, integers(d_heads, "--d-head"),
            None if seq_lens is None else integers(seq_lens, "--seq-len"),
            causal, batch, heads, peers, rounds, device, json,
        )  # fmt: skip
        end_with(ResultFile.load(out / RESULT_FILE))


@app.command(epilog=examples("configs"))
def configs(
    kernels: Annotated[str, typer.Argument(help=SETS_HELP)] = "all",
    causal: Annotated[str, typer.Option(help="no, yes or both")] = "no",
    dtype: Annotated[str, typer.Option(help="only this one")] = "",
    d_head: Annotated[int, typer.Option(help="only this one; 0: any")] = 0,
    words: Annotated[str, typer.Option(help="parts of the short form, joined by commas")] = "",
    built: Annotated[bool | None, typer.Option("--built/--not-built", help="only those")] = None,
    device: Annotated[str, typer.Option(help="a GPU model: say whether it runs them")] = "",
    json: Annotated[Path | None, typer.Option(help=JSON_HELP)] = None,
    plain: Plain = False,
) -> None:
    """List kernels: what each needs, where it is built."""
    with shown_errors():
        from flash_helpers.commands.configs import configs_command

        configs_command(kernels, causal, dtype, d_head, words, built, device, json)


@app.command(epilog=examples("build"))
def build(
    kernels: Annotated[str, typer.Argument(help=SETS_HELP)] = "all",
    causal: Annotated[str, typer.Option(help="no, yes or both")] = "no",
    target: Annotated[str, typer.Option(help="80,90 …; default: the GPUs that are here")] = "",
    jobs: Annotated[int | None, typer.Option(help="compilations at the same time")] = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP)] = None,
    plain: Plain = False,
) -> None:
    """Compile kernels ahead of time."""
    with shown_errors():
        from flash_helpers.commands.build import build_command

        build_command(kernels, causal, target, jobs, json)


@app.command(epilog=examples("doctor"))
def doctor(json: Annotated[Path | None, typer.Option(help=JSON_HELP)] = None, plain: Plain = False) -> None:
    """What works here, what does not, and what to do about it."""
    with shown_errors():
        from flash_helpers.commands.doctor import doctor_command, exit_code

        code = exit_code(doctor_command(json))
    raise typer.Exit(code)


@app.command(
    epilog=examples("cache"), short_help="The folder of compiled kernels: sizes, contents, clear it."
)
def cache(
    action: Annotated[str, typer.Argument(help="size, list or clear")] = "size",
    json: Annotated[Path | None, typer.Option(help=JSON_HELP)] = None,
    plain: Plain = False,
) -> None:
    """The folder of compiled kernels: its size, its contents; clear it."""
    with shown_errors():
        from flash_helpers.commands.cache import cache_command

        cache_command(action, json)


@app.command(epilog=examples("report"))
def report(
    results: Annotated[list[Path], typer.Argument(help="result files of one card")],
    out: Annotated[Path, typer.Option(help="folder to write to")] = Path("report"),
    mode: Annotated[str, typer.Option(help="hot, paused, cold, graph or call")] = "hot",
    readme: Annotated[Path | None, typer.Option(help="fill the marked tables of this file too")] = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP)] = None,
    plain: Plain = False,
) -> None:
    """One self-contained HTML page and figures from result files."""
    with shown_errors():
        from flash_helpers.report.command import report_command

        report_command(results, out, mode, readme, json)


def main() -> None:
    """The console script."""
    with patient_output():
        app()


if __name__ == "__main__":
    main()
