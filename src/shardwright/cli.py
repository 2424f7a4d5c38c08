"""The command line: ``shardwright plan | dryrun | train | verify | bench | generate | tokenize | schedule | convert``.

Every verb takes ``--json`` (one JSON object on stdout, nothing else there). Exit codes: 0 done, 1 ran and the answer is
"no", 2 the user's mistake, 3 a rank failed (named). torch is imported by the verbs that need it, in their ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shardwright.core.run_config import RunConfig
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.launch import start_forkserver, torchrun_env

app = typer.Typer(
    name="shardwright",
    help="Plan, train, verify and serve transformers across every axis of parallelism.",
    epilog="Example: shardwright train examples/tiny.toml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(
    help="Measure a training step beside a peer, interleaved in one run.",
    epilog="Example: shardwright bench train --layout dp=2 --peer ddp",
    no_args_is_help=True,
)
app.add_typer(bench_app, name="bench")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="Run file (TOML), for instance examples/tiny.toml.")]
LayoutText = Annotated[str | None, typer.Option("--layout", help="Layout, for instance dp=2,microbatches=4.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Change a value: section.key=value. Repeatable.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


def _is_main() -> bool:
    """Whether this process speaks for the run: of the ranks of torchrun or srun only rank 0 does."""
    env = torchrun_env()
    return env is None or env.rank == 0


def _warm_up() -> None:
    """Let the process that ranks are forked from import torch while this one does."""
    if torchrun_env() is None:
        start_forkserver()


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")


def _refuse(why: str, options: Mapping[str, object]) -> None:
    """Refuse the first of ``options`` that was given: it would be ignored."""
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} {value} {why}")


@app.command(epilog="Example: shardwright train examples/tiny.toml --layout dp=2 --set train.steps=100")
def train(
    config: ConfigPath,
    layout: LayoutText = None,
    sets: Sets = None,
    resume: Annotated[str, typer.Option(help="auto: the last complete checkpoint; none; or a checkpoint folder.")] = "none",
    profile: Annotated[bool, typer.Option("--profile", help="Write a Perfetto trace of a few steps to trace.json.")] = False,
    check: Annotated[str | None, typer.Option(help="replicas: after each step, that ranks hold alike what they must.")] = None,
    as_json: Json = False,
) -> None:
    """Train a model on text; starts its own ranks, or joins torchrun's or srun's."""
    settings = RunConfig.load(config, sets or (), layout)
    if check not in (None, "replicas"):
        raise typer.BadParameter(f"--check {check} is not known; use --check replicas")
    env = torchrun_env()
    if env is not None:
        settings = settings.for_world(env.world_size)
    from shardwright.train.stop import last_words

    with last_words(Path(settings.train.run_dir), quiet=not _is_main()):
        _warm_up()
        from shardwright.train.display import TrainDisplay, tokenise_progress
        from shardwright.train.loop import train as run
        from shardwright.train.report import final_report
        from shardwright.train.start import RunOptions, prepare_run

        quiet = as_json or not _is_main()
        console = Console(quiet=quiet)
        options = RunOptions(resume, profile, check == "replicas")
        with tokenise_progress(console, quiet=quiet) as progress:
            data = prepare_run(settings, options, progress)
        summary = run(settings, data, options, TrainDisplay(settings.train.steps, console=console, quiet=quiet))
    if not _is_main():
        return
    ledger = summary.pop("ledger", None)
    measured = {"peak_bytes": summary["peak_memory_bytes"], "pipeline": summary.get("pipeline")}
    final_report(console, settings.train.run_dir, **(ledger or {}), **measured)
    if as_json:
        found = {name: value.to_json() for name, value in ledger.items()} if ledger else None
        _print_json({**summary, "ledger": found})
    if summary["stopped"]:
        console.print(f"stopped after step {summary['steps']} and saved; continue with")
        console.print(f"shardwright train {settings.train.run_dir}/config.toml --resume auto", soft_wrap=True)
    elif summary["loss"] is None:
        console.print(f"nothing to do: step {summary['steps']} of {settings.train.steps} was done; raise train.steps")


@app.command(epilog="Example: shardwright verify examples/tiny.toml --layout dp=2")
def verify(
    config: ConfigPath,
    layout: LayoutText = None,
    sets: Sets = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 3,
    mutate: Annotated[
        str | None, typer.Option(help="Break this one thing and see verification fail; without a name, each thing in turn.")
    ] = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="A covering set of layouts of the model made small.")] = False,
    most_ranks: Annotated[
        int | None, typer.Option(min=1, help="--matrix: most ranks of a layout, 8 by default (all axes at once may take 16).")
    ] = None,
    least: Annotated[int | None, typer.Option(min=1, help="--matrix: least number of layouts, 60 by default.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of --matrix (or --mutate all): results that are resumed, and report.html.")
    ] = None,
    gradients: Annotated[
        Path | None,
        typer.Option("--write-gradients", help="Folder for the gradients of the layout and of one process, as safetensors."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare a layout with one process: loss, every gradient, every updated parameter, every byte."""
    settings = RunConfig.load(config, sets or (), layout)
    if not matrix:
        _refuse("is for --matrix; add --matrix or leave it out", {"--least": least, "--most-ranks": most_ranks})
        if mutate != "all":
            _refuse("is for --matrix or --mutate all; add one of them or leave it out", {"--out": out})
    _warm_up()
    from shardwright.verify import command

    console = Console(quiet=as_json or not _is_main())
    folder = out or Path(settings.train.run_dir).parent / "verify"
    if gradients is not None and (matrix or mutate == command.EVERYTHING):
        raise typer.BadParameter("--write-gradients is for one layout; leave --matrix out and name what --mutate breaks")
    if matrix:
        if mutate is not None or layout is not None:
            raise typer.BadParameter("--matrix chooses its layouts and breaks nothing; leave --layout and --mutate out")
        answer = command.matrix(settings, folder, steps, most_ranks or 8, least or 60, console)
    elif mutate == command.EVERYTHING:
        answer = command.mutations(settings, folder, steps, console)
    else:
        answer = command.one_layout(settings, steps, mutate, gradients, console)
    if as_json and _is_main():
        _print_json(answer)
    raise typer.Exit(0 if answer["passed"] else 1)


@app.command(epilog='Example: shardwright generate runs/demo/checkpoints/step-300 --prompt "def main("')
def generate(
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A checkpoint, or a Hugging Face folder.")],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus to draw from.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws.")] = None,
    as_json: Json = False,
) -> None:
    """Continue a text with a saved model, in this process."""
    from shardwright.train.continuation import continue_text

    result = continue_text(model_dir, prompt, max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    if as_json:
        _print_json(result.to_json())
        return
    console = Console()
    console.print(prompt, style="bold", end="", markup=False, highlight=False)
    console.print(result.text, markup=False, highlight=False)
    console.print(f"{len(result.tokens)} tokens, {result.tokens_per_second:.0f} tokens/s", style="dim")


@app.command(epilog="Example: shardwright tokenize books/ notes.jsonl --out data/books --vocab-size 8192")
def tokenize(
    sources: Annotated[list[str], typer.Argument(metavar="SRC...", help="Files, folders and globs.")],
    out: Annotated[Path, typer.Option(help="Folder of the dataset.")],
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json or a folder with one; else one is trained.")] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="Vocabulary of a trained tokenizer.")] = 4096,
    field: Annotated[str | None, typer.Option(help="Name of the text (or the messages) in .jsonl and .parquet records.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Lines hold conversations; only answers are to be learned.")] = False,
    chat_template: Annotated[str | None, typer.Option(help="chatml, or a file; else the tokenizer's template.")] = None,
    valid_fraction: Annotated[float, typer.Option(min=0.0, max=0.999, help="Share of documents held out.")] = 0.02,
    as_json: Json = False,
) -> None:
    """Turn text into an indexed dataset (Megatron's .bin and .idx) with a held-out part."""
    from dataclasses import asdict

    from shardwright.train.display import tokenise_progress
    from shardwright.train.prepare import tokenize_sources

    console = Console(quiet=as_json)
    with tokenise_progress(console, quiet=as_json) as progress:
        name = field or ("messages" if chat else "text")
        options: dict[str, Any] = {"chat": chat, "template": chat_template}
        info = tokenize_sources(sources, out, tokenizer, vocab_size, name, valid_fraction, progress, **options)
    if as_json:
        _print_json({"out": str(out), **asdict(info)})
        return
    console.print(
        f"{out}: {info.documents} documents of {info.files} files; {info.train_tokens} tokens to train on, "
        f"{info.valid_tokens} held out; {info.skipped} skipped, {info.replaced} with bytes replaced"
    )


@app.command(epilog="Example: shardwright convert runs/demo/checkpoints/step-300 exported --dtype bf16")
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Checkpoint, Hugging Face folder or torch DCP folder.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to make.")],
    to: Annotated[str, typer.Option(help="hf: weights; checkpoint: DST/step-N, to resume from; dcp: for torch.")] = "hf",
    model: Annotated[str | None, typer.Option(help="Preset or config.json, where SRC does not name its model.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Convert the weights: fp32, bf16, fp16 or fp64.")] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint or a model in another format: Hugging Face, torch's distributed checkpoint, or our own."""
    from shardwright.checkpoint.convert import convert as run

    made = run(source, target, to, model=model, dtype=dtype)
    if as_json:
        _print_json(made.to_json())
        return
    state = f", optimizer state {', '.join(made.optimizer)}" if made.optimizer else ""
    print(f"{made.path}: {made.parameters} parameters{state}, from {made.source} to {made.target}")


@app.command("plan", epilog="Example: shardwright plan llama-3.1-70b --cluster h100-80gb:8x8 --seq 8192 --global-batch 512")
def plan_(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Preset, Hugging Face file or folder, TOML with [model], or a run file.")
    ],
    cluster: Annotated[str, typer.Option(help="CHIP:NODESxGPUS (h100-80gb:8x8) or a cluster file (TOML).")],
    layout: Annotated[
        str | None,
        typer.Option(help="Layout to price, for instance tp=8,dp=4; a run file's is the default, 'search' looks for the best."),
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="Sequences of one step over all ranks.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Candidates to show.")] = 5,
    purpose: Annotated[str, typer.Option("--for", help="train or serve.")] = "train",
    report: Annotated[Path | None, typer.Option(help="Write a self-contained HTML page (for train).")] = None,
    input_tokens: Annotated[int | None, typer.Option(min=1, help="serve: tokens of a prompt (default 1024).")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="serve: tokens of an answer (default 1024).")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="serve: requests at once (default 16).")] = None,
    objective: Annotated[str | None, typer.Option(help="serve: latency or throughput (default throughput).")] = None,
    max_ttft_ms: Annotated[float | None, typer.Option(help="serve: limit on the time to the first token.")] = None,
    max_tpot_ms: Annotated[float | None, typer.Option(help="serve: limit on the time per output token.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp8 or fp4 (default bf16).")] = None,
    as_json: Json = False,
) -> None:
    """Will it fit and how fast is it: price one layout, or search and rank all of them. Exit code 1: it does not fit."""
    from shardwright.plan.command import make_plan, make_serving_plan
    from shardwright.plan.explain import print_plan
    from shardwright.plan.report import write_report
    from shardwright.plan.serve_explain import print_serving
    from shardwright.plan.serve_search import Target
    from shardwright.plan.serving import Load

    if purpose not in ("train", "serve"):
        raise ConfigError(f"--for {purpose} is not known; use train or serve")
    if purpose == "serve":
        _refuse("is of a training plan; leave it out with --for serve",
                {"--report": report, "--seq": seq, "--global-batch": global_batch})  # fmt: skip
        ttft, tpot = (None if limit is None else limit / 1e3 for limit in (max_ttft_ms, max_tpot_ms))
        load = Load(input_tokens or 1024, output_tokens or 1024, concurrency or 16)
        target = Target(objective or "throughput", ttft, tpot)
        served = make_serving_plan(model, cluster, layout, load, target, precision, top)
        if as_json:
            _print_json(served.to_json())
        else:
            print_serving(Console(), served)
        raise typer.Exit(0 if served.fits else 1)
    _refuse("is of a serving plan; add --for serve or leave it out", {
        "--input-tokens": input_tokens, "--output-tokens": output_tokens, "--concurrency": concurrency,
        "--objective": objective, "--max-ttft-ms": max_ttft_ms, "--max-tpot-ms": max_tpot_ms,
    })  # fmt: skip
    made = make_plan(model, cluster, layout, seq, global_batch, top, precision)
    if report is not None:
        write_report(report, made.plan, made.pricer)
    if as_json:
        _print_json(made.plan.to_json())
    else:
        print_plan(Console(), made.plan, made.pricer)
        if report is not None:
            print(f"report: {report}")
    raise typer.Exit(0 if made.plan.fits else 1)


@app.command(epilog="Example: shardwright dryrun examples/llama-405b.toml --layout tp=8,pp=16,dp=128,zero=1,microbatches=64")
def dryrun(
    config: ConfigPath,
    layout: LayoutText = None,
    sets: Sets = None,
    as_json: Json = False,
) -> None:
    """The real training step with shapes only, for every pipeline stage of any world. Exit code 1: the closed form differs."""
    settings = RunConfig.load(config, sets or (), layout)
    from shardwright.train.dry_report import dry_report
    from shardwright.train.dryrun import dry_run

    console = Console(quiet=as_json)
    with console.status("stage by stage") as status:
        result = dry_run(settings, lambda done, of: status.update(f"{done} of {of} stages"))
    if as_json:
        _print_json(result.to_json())
    else:
        dry_report(console, result)
    raise typer.Exit(0 if result.agrees else 1)


@app.command("schedule", epilog="Example: shardwright schedule zb_v --stages 4 --microbatches 8")
def draw_schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="gpipe, 1f1b, interleaved, zb_h1, ... or file:PATH.")],
    stages: Annotated[int | None, typer.Option(min=1, help="Pipeline ranks (a file says it itself).")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Micro-batches (a file says it itself).")] = None,
    virtual: Annotated[int, typer.Option(min=1, help="Chunks per rank, for interleaved schedules.")] = 1,
    f: Annotated[float, typer.Option("--f", min=0.0, help="Time of one chunk's forward.")] = 1.0,
    b: Annotated[float, typer.Option("--b", min=0.0, help="Time of its input gradient.")] = 1.0,
    w: Annotated[float, typer.Option("--w", min=0.0, help="Time of its weight gradient.")] = 1.0,
    svg_path: Annotated[Path | None, typer.Option("--svg", metavar="OUT", help="Draw it into this file too.")] = None,
    as_json: Json = False,
) -> None:
    """Draw and check a pipeline schedule: who computes what when, the bubble, what is in flight."""
    from shardwright.schedule.draw import grid, report, svg

    result = report(name, stages, microbatches, virtual, (f, b, w))
    console = Console(quiet=as_json)
    if result.timeline is not None:
        console.print(grid(result.timeline, console.width))
        if svg_path is not None:
            svg_path.parent.mkdir(parents=True, exist_ok=True)
            svg_path.write_text(svg(result.timeline), encoding="utf-8")
    for line in (*result.lines(), *result.problems):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        _print_json(result.to_json())
    raise typer.Exit(1 if result.problems else 0)


@bench_app.command("comm", epilog="Example: shardwright bench comm --ranks 2 --out runs/comm")
def bench_comm(
    ranks: Annotated[int, typer.Option(min=2, help="Ranks on this machine.")] = 2,
    most_mb: Annotated[int, typer.Option("--max-mb", min=1, help="Largest buffer in MiB.")] = 64,
    transport: Annotated[
        list[str] | None, typer.Option(help="gloo, 'gloo composed', shm, 'shm own' or nccl. Repeatable; else all.")
    ] = None,
    steps: Annotated[bool, typer.Option(help="Train a few steps too (CPU ranks), for the software's share.")] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for comm.json, comm.png and cluster.toml.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the links: seconds of every verb against size, a fitted line, and a cluster file for the planner."""
    from shardwright.bench_comm import bench_comm as run
    from shardwright.bench_comm import comm_table, plot_comm

    with Console(stderr=True).status("verbs on every transport, then a few training steps: a minute or two"):
        result = run(ranks, most_mb << 20, transport or (), steps)
    if not _is_main():
        return
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "comm.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        (out / "cluster.toml").write_text(result["cluster"], encoding="utf-8")
        plot_comm(result, out / "comm.png")
    if as_json:
        _print_json(result)
        return
    console = Console()
    console.print(comm_table(result))
    if out is not None:
        console.print(f"{out}: comm.json, comm.png, cluster.toml (for plan --cluster)")


@bench_app.command("train", epilog="Example: shardwright bench train --layout dp=2 --peer ddp")
def bench_train(
    layout: LayoutText = "dp=2,micro_batch=4",
    peer: Annotated[
        str,
        typer.Option(
            help="ddp, zero_redundancy, fsdp1, fsdp2, parallelize_module, pipelining (PyTorch's), deepspeed, or own: ours again."
        ),
    ] = "ddp",
    peer_layout: Annotated[str, typer.Option(help="The peer's layout; by default as ours.")] = "",
    model: Annotated[str, typer.Option(help="Preset or Hugging Face folder.")] = "bench-25m",
    seq_len: Annotated[int, typer.Option(min=2)] = 256,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of ours, theirs, ours, theirs.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each side in a round.")] = 1,
    tune_peer: Annotated[
        bool, typer.Option("--tune-peer", help="Start the peer with our settings of the memory allocator too.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Keep the JSON here.")] = None,
    as_json: Json = False,
) -> None:
    """Time a training step of ours and a peer's on the same model, batch and steps; show the memory of both."""
    _warm_up()
    from shardwright.bench import bench_table, bench_training

    result = bench_training(
        layout or "dp=2", peer, model, seq_len, rounds, steps, peer_layout=peer_layout, tune_peer=tune_peer
    )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if as_json:
        _print_json(result)
    else:
        Console().print(bench_table(result))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from shardwright import __version__

        typer.echo(__version__)
        raise typer.Exit


_UsageError: type[Exception] = typer.BadParameter.__mro__[2]
"""What typer raises for a wrong command line: click's ClickException or typer's copy of it, which has no public name."""


def main() -> int:
    """Run the command line and return its exit code; errors of ours are one message on stderr, no traceback."""
    code = 0
    try:
        code = app(_with_names(sys.argv[1:]), prog_name="shardwright", standalone_mode=False) or 0
    except _UsageError as error:
        if message := _usage_message(error):
            print(message, file=sys.stderr)
        return 2
    except ShardwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    if code == 130:
        print("interrupted", file=sys.stderr)
    return code


def _with_names(words: list[str]) -> list[str]:
    """``--mutate`` without a name means all of them."""
    named: list[str] = []
    for word, following in pairwise([*words, "--"]):
        named += [word, "all"] if word == "--mutate" and following.startswith("-") else [word]
    return named


def _usage_message(error: Any) -> str:
    """A wrong command line in one line that names the help to read."""
    text: str = error.format_message().removesuffix(".")
    if "\n" in text or not text:  # no argument was given: the whole help (with rich it is printed already)
        return text
    command = error.ctx.command_path if getattr(error, "ctx", None) else "shardwright"
    hint = "" if text.endswith("?") else f"; see {command} --help"
    return f"error: {text[0].lower()}{text[1:]}{hint}"
