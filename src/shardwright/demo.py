"""``make demo``: the main job on real text, from the files of the running Python to a continued line of code.

1. the standard library's source files become an indexed dataset, with a tokenizer trained on them (kept for next time);
2. ``examples/demo.toml`` is trained over two processes; 3. what happened, as tables and curves; 4. the checkpoint, loaded
in one process, continues a prompt, with a cache and without, token for token the same.
"""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path

from rich.console import Console

from shardwright.core.run_config import RunConfig
from shardwright.errors import ShardwrightError
from shardwright.train.continuation import continue_text
from shardwright.train.display import TrainDisplay, tokenise_progress
from shardwright.train.loop import train
from shardwright.train.report import final_report
from shardwright.train.start import RunOptions, prepare_run
from shardwright.train.stop import last_words
from shardwright.train.text import PYTHON_LIBRARY

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "demo.toml"
PROMPT = "def __init__(self, name"
NEW_TOKENS = 60


def run_demo(console: Console, sets: tuple[str, ...] = ()) -> None:
    """All four parts; ``sets`` changes the run file as ``--set`` does."""
    run_dir = Path("runs") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    config = RunConfig.load(CONFIG, [f"train.run_dir={run_dir}", "data.cache=runs/datasets", *sets])
    console.rule("1  text")
    start = time.perf_counter()
    with tokenise_progress(console) as progress:
        data = prepare_run(config, RunOptions(), progress)
    library = all(source.path == PYTHON_LIBRARY for source in config.data.sources)
    kind = "source files of Python's standard library" if library else "files"
    for info in data.infos:
        console.print(
            f"{info.files:,} {kind}: {info.train_tokens:,} tokens to train on, {info.valid_tokens:,} held out in "
            f"{info.valid_documents:,} files; {info.replaced} files are not UTF-8 (decoded with replacement), "
            f"{info.skipped} skipped; {time.perf_counter() - start:.1f} s"
        )
    console.rule(f"2  train over {config.layout.world_size} processes")
    console.print(f"{config.model.num_parameters():,} parameters, layout {config.layout}, {config.train.steps} steps")
    with last_words(run_dir):
        summary = train(config, data, RunOptions(), TrainDisplay(config.train.steps, console=console))
    console.rule("3  what happened")
    final_report(console, config.train.run_dir, **summary["ledger"], peak_bytes=summary["peak_memory_bytes"])
    if summary["bits_per_byte"] is not None:
        console.print(
            f"held-out loss [bold]{summary['valid_loss']:.3f}[/] nats per token, {summary['bits_per_byte']:.3f} bits per "
            f"byte, on {sum(info.valid_documents for info in data.infos):,} files that were not trained on"
        )
    if summary["stopped"]:
        console.print(f"stopped after step {summary['steps']} and saved; continue with")
        console.print(f"shardwright train {config.train.run_dir}/config.toml --resume auto", soft_wrap=True)
        return
    console.rule("4  generate, one process")
    result = continue_text(Path(summary["checkpoint"]), PROMPT, NEW_TOKENS, compare=True)
    console.print(PROMPT, style="bold", end="", markup=False, highlight=False)
    console.print(result.text, markup=False, highlight=False)
    same = "[green]yes[/]" if result.same_when_recomputed else "[red]no[/]"
    console.print(
        f"{len(result.tokens)} tokens with a key-value cache at {result.tokens_per_second:.0f} tokens/s; "
        f"the same as recomputing the whole text for each: {same}"
    )


def main() -> int:
    """``python -m shardwright.demo [section.key=value ...]``"""
    try:
        run_demo(Console(), tuple(sys.argv[1:]))
    except ShardwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
