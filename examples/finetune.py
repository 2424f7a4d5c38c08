"""Fine-tune a pretrained model over four processes, change the layout in the middle, and load the result in transformers.

    python examples/finetune.py MODEL_DIR TEXT [--steps 40] [--out runs/finetune]

MODEL_DIR is a Hugging Face folder, TEXT a text file, or a .jsonl file with chat messages, of which the answers are learned.
The first half of the steps runs with two pipeline stages of two tensor-parallel ranks, the second half with two replicas
of two tensor-parallel ranks: the same samples in the same order, so the losses are those of one process. The last
checkpoint is a Hugging Face folder; its logits in transformers are compared with ours.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shardwright import RunConfig
from shardwright.ops.attention import CausalAttend
from shardwright.train.continuation import load_model
from shardwright.train.display import TrainDisplay
from shardwright.train.loop import train
from shardwright.train.metrics import read_metrics
from shardwright.train.start import RunOptions, prepare_run

FIRST, SECOND = "tp=2,pp=2,microbatches=4,micro_batch=2", "dp=2,tp=2,microbatches=2,micro_batch=2"
"""Eight sequences in a step, both."""


@dataclass(frozen=True)
class Tuned:
    """``losses`` of every step; ``logit_difference``: the largest against transformers, None without it."""

    checkpoint: Path
    losses: list[float]
    valid_losses: list[float]
    logit_difference: float | None


def run_table(model: Path, text: Path, out: Path, seq_len: int) -> dict[str, Any]:
    """The run file as a table. The learning rate is constant after the warm-up, so that either half may be any length."""
    chat = text.suffix == ".jsonl"
    return {
        "model": str(model),
        "data": {
            "sources": [{"path": str(text), "format": "chat" if chat else "text"}],
            "seq_len": seq_len,
            "cache": str(out / "datasets"),
            "chat_template": "chatml" if chat and not has_template(model) else None,
        },
        "optim": {"lr": 3e-4, "warmup_steps": 2, "schedule": "constant", "weight_decay": 0.0},
        "train": {"init_from": str(model), "run_dir": str(out / "run"), "eval_batches": 4},
    }


def has_template(model: Path) -> bool:
    config = model / "tokenizer_config.json"
    return (model / "chat_template.jinja").is_file() or (config.is_file() and "chat_template" in config.read_text("utf-8"))


def train_part(table: dict[str, Any], layout: str, steps: int, resume: str, console: Console) -> Path:
    """Train up to ``steps`` in this layout; the folder of the last checkpoint."""
    config = RunConfig.of(table, [f"train.steps={steps}", f"train.eval_every={steps}"], layout)
    options = RunOptions(resume=resume)
    data = prepare_run(config, options)
    console.print(f"[bold]{layout}[/] up to step {steps}")
    summary = train(config, data, options, TrainDisplay(steps, console=console, quiet=console.quiet))
    return Path(summary["checkpoint"])


def finetune(model: Path, text: Path, out: Path, steps: int = 40, seq_len: int = 128, console: Console | None = None) -> Tuned:
    """Both halves, and the comparison with transformers."""
    console = console or Console()
    table = run_table(model, text, out, seq_len)
    train_part(table, FIRST, steps // 2, "none", console)
    checkpoint = train_part(table, SECOND, steps, "auto", console)
    records = read_metrics(table["train"]["run_dir"])
    return Tuned(
        checkpoint,
        [record["loss"] for record in records],
        [record["valid_loss"] for record in records if record.get("valid_loss") is not None],
        compare_logits(checkpoint, text.read_text(encoding="utf-8", errors="replace")[-400:]),
    )


@torch.no_grad()
def compare_logits(checkpoint: Path, text: str) -> float | None:
    """The largest difference between our logits and those of transformers, over their size; None without transformers."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    ours, tokenizer = load_model(checkpoint)
    tokens = torch.tensor(tokenizer.encode(text)[: ours.config.max_positions])
    mine = ours(tokens, torch.arange(len(tokens)), CausalAttend((len(tokens),)))
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()(tokens[None]).logits[0]
    return ((mine - theirs).abs().max() / theirs.abs().max()).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/finetune"))
    arguments = parser.parse_args()
    tuned = finetune(arguments.model, arguments.text, arguments.out, arguments.steps)
    middle = arguments.steps // 2
    print(f"loss {tuned.losses[0]:.3f} -> {tuned.losses[middle - 1]:.3f} | {tuned.losses[middle]:.3f} -> {tuned.losses[-1]:.3f}")
    if tuned.valid_losses:
        print(f"held out {' -> '.join(f'{loss:.3f}' for loss in tuned.valid_losses)}")
    if tuned.logit_difference is None:
        print("transformers is not installed: logits were not compared")
    else:
        print(f"logits against transformers: largest difference {tuned.logit_difference:.1e} of the largest logit")
    print(f"a Hugging Face folder: {tuned.checkpoint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
