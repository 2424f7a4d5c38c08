"""Measured runs as cases to price: one CSV row is a model, a layout, a cluster, a stack and what was measured.

Columns are those of published tables of training runs (``source``, ``model``, ``layers``, ...) or of step times of GPTs
(``# GPUs``, ``iteration time (ms)``, ...). What a row leaves out follows from what its kind of run is known to do; a row
that lacks more than that is refused with the reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shardwright.core.cluster import Chip, Cluster, find_chip
from shardwright.core.layout import Layout
from shardwright.core.model_config import ModelConfig
from shardwright.core.presets import preset
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.plan.stack import Stack, eager

Row = Mapping[str, str]


@dataclass(frozen=True)
class Case:
    """One measured run. ``seconds`` of a step, or ``tokens_per_second`` per GPU; both None: it ran out of memory.

    ``family`` names rows that differ in their layout only: among them a choice is judged.
    """

    group: str
    label: str
    stack: str
    model: ModelConfig
    layout: Layout
    cluster: Cluster
    seq: int
    seconds: float | None
    out_of_memory: bool = False
    family: str = ""
    memory_gib: float | None = None
    eager: bool = False
    """Without a compiler, where the stack's other rows have one."""

    rowwise: bool = False
    """fp8 with a scale for each row: operands are read and written once for either direction, twice in all."""
    loss_by_operator: bool = False
    """Cross entropy in fp32, operator by operator, where the stack's other rows compile it."""
    allocated: bool = False
    """``memory_gib`` is the allocator's peak of allocated bytes, not what the device holds."""

    def stack_for(self, stack: Stack) -> Stack:
        """``stack`` as this run used it."""
        if self.rowwise:
            stack = replace(stack, quantise=2 * stack.quantise)
        if self.loss_by_operator:  # log-softmax, its gradient, that of the logits; one more where each rank has a part
            stack = replace(stack, logit_bytes=16.0 if self.layout.tp > 1 else 12.0)
        return eager(stack) if self.eager else stack


@dataclass(frozen=True)
class Refused:
    """A row that is not priced, and why."""

    group: str
    label: str
    reason: str


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; raises :class:`ConfigError` where it cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a CSV file of measured runs") from None


def training_cases(path: Path, rows: Sequence[Row]) -> list[Case | Refused]:
    """Rows of a table of training runs; raises :class:`ConfigError` for a table of another kind."""
    columns = set(rows[0]) if rows else set()
    if "iteration time (ms)" in columns:
        return [_step_row(row) for row in rows]
    if {"source", "tokens_per_s_per_gpu"} <= columns:
        return [_published_row(row) for row in rows]
    raise ConfigError(f"{path} has the columns {sorted(columns)[:6]}..., which are no table of runs that is known")


def read_cases(path: Path) -> list[Case | Refused]:
    """Every row of a CSV file of training runs; raises :class:`ConfigError` for a file of another kind."""
    return training_cases(path, read_rows(path))


# -- step times of GPTs ------------------------------------------------------------------------------


def gpt(layers: int, hidden: int, heads: int, vocab: int, seq: int, ffn: int = 0) -> ModelConfig:
    """A GPT as Megatron trains it: learned positions, biases, dropout, a tied head."""
    return ModelConfig(
        name="gpt", family="gpt2", vocab_size=vocab, dim=hidden, num_layers=layers, num_heads=heads,
        ffn_dim=ffn or 4 * hidden, max_positions=max(seq, 1), norm="layernorm", activation="gelu_tanh",
        position="learned", qkv_bias=True, out_bias=True, mlp_bias=True, tied_head=True, dropout=0.1,
    )  # fmt: skip


def node_cluster(chip: Chip, gpus: int, per_node: int, inter: float | None = None) -> Cluster:
    """``gpus`` of ``chip`` in nodes of at most ``per_node``; ``inter``: bytes/s between nodes per GPU."""
    per_node = max(k for k in range(1, min(per_node, gpus) + 1) if gpus % k == 0)
    if inter is not None:
        chip = replace(chip, inter_bandwidth=inter)
    return Cluster.of(chip, gpus // per_node, per_node)


def _step_row(row: Row) -> Case:
    tp, dp, pp = (int(row[f"{axis} parallelism"]) for axis in ("tensor", "data", "pipeline"))
    gpus, batch, micro = int(row["# GPUs"]), int(row["global batch"]), int(row["micro batch"])
    hidden, layers, seq = int(row["hidden size"]), int(row["# layers"]), int(row["sequence length"])
    layout = Layout(
        tp=tp, dp=dp, pp=pp, sp="off", micro_batch=micro, microbatches=batch // (dp * micro), recompute="full",
        precision="bf16", reduce_dtype="bf16", bucket_mb=500.0, zero=0,
    )  # fmt: skip
    nodes = gpus > 8
    size = row.get("Parameters (billion)", "")
    return Case(
        group="A100 multi-node" if nodes else "A100 single-node",
        label=f"{size or f'{layers}x{hidden}'} {layout}",
        stack="megatron-deepspeed-a100" if nodes else "megatron-deepspeed-a100-node",
        model=gpt(layers, hidden, int(row["attention heads"]), 51200, seq),
        layout=layout,
        cluster=node_cluster(find_chip("a100-80gb"), gpus, 8, 12.5e9),  # 800 Gb/s a node
        seq=seq,
        seconds=float(row["iteration time (ms)"]) / 1e3,
        family=f"{size or f'{layers}x{hidden}'} on {gpus}, batch {batch}",
    )


# -- published runs ----------------------------------------------------------------------------------

_SOURCES: tuple[tuple[str, str, str], ...] = (
    ("SC21", "SC21 table 1", "megatron-2021"),
    ("Tables 3-5", "Korthikanti table 5", "megatron-2022"),
    ("sec. 6.3", "Megatron 530B on 2,240", "megatron-2022"),
    ("chronicles-prequel", "BLOOM", "bloom"),
    ("llm-foundry", "FSDP", "composer"),
    ("Megatron-Bridge", "Megatron-Bridge", "bridge"),
    ("arXiv 2603.07685", "Megatron-Core MoE report", "bridge"),
    ("dgxc-benchmarking", "DGXC", "nemo"),
    ("torchtitan", "torchtitan", "torchtitan"),
    ("nanotron", "nanotron", "nanotron"),
    ("KempnerForge", "KempnerForge", "kempner"),
    ("model_table", "Megatron-Core", "nemo"),
    ("Llama 3 report", "Llama 3 report", "nemo"),
    ("DeepSeek-V3 report", "DeepSeek-V3 report", "nemo"),
)
"""Part of a source's name -> (group, stack without the chip)."""

_PRESETS = (
    ("deepseekv3", "deepseek-v3"), ("deepseek-v3-16b", "deepseek-v2-lite"), ("deepseek-v3", "deepseek-v3"),
    ("qwen3_30b", "qwen3-30b-a3b"), ("qwen3-30b", "qwen3-30b-a3b"), ("qwen3_235b", "qwen3-235b-a22b"),
    ("qwen3-235b", "qwen3-235b-a22b"), ("gpt oss 120b", "gpt-oss-120b"), ("llama3_8b", "llama-3.1-8b"),
    ("llama3_70b", "llama-3.1-70b"), ("llama3.1_405b", "llama-3.1-405b"), ("llama 3.1 8b", "llama-3.1-8b"),
    ("llama 3 8b", "llama-3.1-8b"), ("llama 3.1 70b", "llama-3.1-70b"), ("llama 3 70b", "llama-3.1-70b"),
    ("llama-3-style 7b", "llama-3.1-8b"), ("llama 3 405b", "llama-3.1-405b"), ("llama 3.1 405b", "llama-3.1-405b"),
    ("mt-nlg 530b", "mt-nlg-530b"),
)  # fmt: skip

_MPT = {
    "1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}  # fmt: skip
"""Layers, width and heads of the MPT family."""

_NEMOTRON = {"340b": (96, 18432, 96, 8, 73728), "15b": (32, 6144, 48, 8, 24576)}
"""Layers, width, heads, KV heads and MLP width of Nemotron-4 (squared ReLU, two matrices)."""

_GROK = (64, 6144, 48, 8, 32768, 8, 2, 131072)
"""Layers, width, heads, KV heads, expert width, experts, top-k and vocabulary of Grok-1."""


def _published_row(row: Row) -> Case | Refused:
    source = row["source"]
    known = next(((group, stack) for part, group, stack in _SOURCES if part in source), (source, ""))
    group, stack = known
    label = f"{row['model']} on {row['n_gpus']} {row['gpu']}"
    try:
        case = _published_case(row, group, stack, label)
    except ShardwrightError as error:
        return Refused(group, label, str(error))
    return case


def _published_case(row: Row, group: str, stack: str, label: str) -> Case:
    if not stack:
        raise ConfigError("no software stack of ours describes this source")
    if "lora" in row["notes"].lower() or "tokendrop" in row["model"] or "tokendrop" in row["notes"]:
        raise ConfigError("adapters or dropped tokens: not a full training step")
    chip = _chip(row)
    model = _model(row)
    layout = _layout(row, model, stack)
    seq = int(row["seq_len"] or (2048 if "GPT" in row["model"] else 4096))
    cluster = node_cluster(chip, int(row["n_gpus"]), _per_node(row, chip), _inter(row))
    oom = "OOM" in row["notes"] and not row["tokens_per_s_per_gpu"]
    seconds = None if oom else _seconds(row, model, layout, seq)
    kind = " MoE" if model.moe is not None else ""
    memory = float(row["mem_gb_per_gpu"]) if row["mem_gb_per_gpu"] else None
    return Case(
        group=f"{group}{kind} {_generation(chip)}"
        if stack not in ("megatron-2021", "megatron-2022", "bloom")
        else group,
        label=f"{label}: {layout}",
        stack=f"{stack}-{_generation(chip)}{_release(row, stack, chip)}".lower(),
        model=model,
        layout=layout,
        cluster=cluster,
        seq=seq,
        seconds=seconds,
        out_of_memory=oom,
        family=_family(row, seq),
        memory_gib=memory,
        rowwise="rowwise" in row["precision"],
        eager=bool(re.search(r"\beager\b|no compile|compile off", row["notes"])),
        loss_by_operator=stack == "torchtitan" and _before_2025(row),
        allocated=stack == "kempner" or "peak allocated" in row["notes"],
    )


def _family(row: Row, seq: int) -> str:
    """Rows with the same text differ in nothing but their layout, as far as their source says: neither the heads nor the
    machine (BigScience's chronicles warn not to compare what ran before and after its PCIe and NUMA settings were mended)."""
    machine = "before" if "before NUMA fix" in row["notes"] else ""
    fields = ("model", "heads", "n_gpus", "gpu", "global_batch", "precision")
    return " ".join((row["source"][:40], *(row[field] for field in fields), str(seq), machine)).rstrip()


def _before_2025(row: Row) -> bool:
    """Of torchtitan, from its code: releases to the end of 2024 computed the loss without the compiler, and cut a rank's batch
    into as many micro-batches as there are pipeline ranks (its issue 773 is of such a run, its pull request 781 of 2025
    changes the count)."""
    return row["year"] == "2024" or "issue 773" in row["source"]


def _generation(chip: Chip) -> str:
    family = chip.name.split("-")[0]
    if family in ("H100", "H200", "H800"):
        return "hopper"
    return "blackwell" if family in ("B200", "GB200", "B300", "GB300") else family.lower()


def _release(row: Row, stack: str, chip: Chip) -> str:
    """Releases of Megatron-Bridge on Blackwell differ by a third: a stack for each half year."""
    if stack != "bridge" or _generation(chip) != "blackwell":
        return ""
    found = re.search(r"container (\d+)\.(\d+)", row["notes"])
    if found is None:  # the Megatron-Core report of 2026
        return "-26b"
    year, month = int(found[1]), int(found[2])
    return "-25b" if year < 26 else "-26a" if month < 6 else "-26b"


def _chip(row: Row) -> Chip:
    name = row["gpu"]
    if name.startswith("H100-96GB") or ("torchtitan" in row["source"] and name == "H100"):
        # the same machines (some of their runs use more than 80 GB): HBM2e; what a limit of 500 W costs is in the shares
        return replace(find_chip("h100"), memory_bytes=96 * 2**30, memory_bandwidth=2.4e12)
    plain = re.sub(r"\s*\(.*\)", "", name).replace("TPU v", "tpu-v")
    if plain == "A100":
        plain = "A100-80GB"
    return find_chip(plain)


def _per_node(row: Row, chip: Chip) -> int:
    if "4 GPUs per node" in row["notes"]:
        return 4
    return 64 if chip.domain_size == 72 else min(8, chip.domain_size)


def _inter(row: Row) -> float | None:
    return 6.25e9 if "chronicles" in row["source"] else None  # 4 x 100 Gb/s a node of 8


def _model(row: Row) -> ModelConfig:
    name, seq = row["model"].lower(), int(row["seq_len"] or 2048)
    if "proxy" in name and "405b" in name:
        return preset("llama-3.1-405b", num_layers=int(row["layers"]))
    if "llama 2 70b" in name:
        return preset("llama-3.1-70b", vocab_size=32000)
    if name.startswith("grok"):
        return _grok(int(row["layers"] or 0))
    for part, known in _PRESETS:
        if part in name:
            return preset(known)
    if name.startswith("mpt-"):
        layers, hidden, heads = _MPT[name.removeprefix("mpt-")]
        base = gpt(layers, hidden, heads, 50368, seq)
        return base.model_copy(
            update={"dropout": 0.0, "qkv_bias": False, "out_bias": False, "mlp_bias": False, "name": name}
        )
    size = next((key for key in _NEMOTRON if key in name), "") if "nemotron-4" in name else ""
    if size:
        layers, hidden, heads, kv_heads, ffn = _NEMOTRON[size]
        return ModelConfig(
            name=name, vocab_size=256000, dim=hidden, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads,
            ffn_dim=ffn, activation="gelu", norm="layernorm",
        )  # fmt: skip
    if not (row["layers"] and row["hidden"]):
        raise ConfigError("the row gives no layers or no width, and no model of that name is known")
    layers, hidden = int(row["layers"]), int(row["hidden"])
    heads = int(row["heads"]) if row["heads"] else hidden // 128
    default = (
        250880 if "BLOOM" in row["model"] else 128256 if "llama-3-style" in name or "dense 175b" in name else 51200
    )
    vocab = int(row["vocab"]) if row["vocab"] else default
    if name.startswith(("gpt", "bloom")):
        model = gpt(layers, hidden, heads, vocab, seq, int(row["ffn"] or 0))
        return model.model_copy(update={"dropout": 0.0}) if "BLOOM" in row["model"] or "H100" in row["gpu"] else model
    if not row["ffn"].isdigit():
        raise ConfigError("the row gives no MLP width")
    return ModelConfig(
        name=name, vocab_size=vocab, dim=hidden, num_layers=layers, num_heads=heads,
        num_kv_heads=int(row["kv_heads"] or heads), ffn_dim=int(row["ffn"]), max_positions=seq,
        tied_head="nanotron" in row["source"] and int(row["ffn"]) < 10_000,  # as its script of these runs has it
    )  # fmt: skip


def _grok(layers: int) -> ModelConfig:
    all_layers, hidden, heads, kv_heads, expert, experts, top_k, vocab = _GROK
    return ModelConfig(
        name="grok-1", vocab_size=vocab, dim=hidden, num_layers=layers or all_layers, num_heads=heads,
        num_kv_heads=kv_heads, ffn_dim=expert, max_positions=8192,
        moe={"num_experts": experts, "top_k": top_k, "expert_dim": expert},
    )  # fmt: skip


def _layout(row: Row, model: ModelConfig, stack: str) -> Layout:
    def degree(name: str) -> int:
        return int(row[name]) if row[name] else 1

    tp, pp, virtual, cp, ep = (degree(name) for name in ("tp", "pp", "vpp", "cp", "ep"))
    gpus = int(row["n_gpus"])
    if not row["tp"] or gpus % (tp * pp * cp):
        raise ConfigError("the row does not give the whole layout")
    dp = gpus // (tp * pp * cp)
    sharding, recompute = row["zero/fsdp"].lower(), row["recompute"].lower()
    if stack == "torchtitan" and not recompute:  # the shipped default; runs of 405B repeat all
        recompute = "full" if "405B" in row["model"] else "selective"
    micro = int(row["micro_batch"] or 1)
    batch = int(row["global_batch"]) if row["global_batch"].isdigit() else _step_batch(row, micro, dp, pp)
    if batch % (dp * micro):
        raise ConfigError(f"the global batch of {batch} does not divide into dp={dp} x {micro}")
    if stack == "torchtitan" and pp > 1:  # the column holds a rank's whole batch, which the schedule cuts
        micro = max(1, micro // pp) if _before_2025(row) else 1
    sharded = sharding.startswith(("fsdp", "zero3")) and sharding != "no fsdp"
    notes = row["notes"].lower()
    if "interleaved" in notes and not row["vpp"]:
        virtual = 2 if stack == "torchtitan" else model.num_layers // pp  # torchtitan's own default
    virtual = min(virtual, model.num_layers // pp) if pp > 1 else 1
    bf16_gradients = (
        stack == "megatron-2021" or "fp16" in row["precision"] or (stack == "kempner" and sharding == "none")
    )
    schedule = "interleaved_zb" if "interleavedzerobubble" in notes else "interleaved"
    return Layout(
        tp=tp, pp=pp, cp=cp, ep=ep, dp=dp,
        virtual=virtual,
        schedule=schedule if virtual > 1 else "1f1b",
        stages=_stages(model.num_layers, pp * virtual),
        zero=0 if sharding in ("ddp", "none") or "zero0" in sharding else 3 if sharded else 1,
        zero1_reduce="allreduce" if stack == "bloom" else "scatter",  # DeepSpeed's bf16 optimizer sums whole gradients
        micro_batch=micro,
        microbatches=batch // (dp * micro),
        sp="off" if "no sequence parallelism" in recompute or stack in ("megatron-2021", "bloom") or tp == 1 else "on",
        recompute="full" if recompute.startswith("full") else "selective" if recompute.startswith("selective") else "none",
        precision=_precision(row),
        reduce_dtype="bf16" if bf16_gradients else "fp32",
        cp_kind="allgather" if "all-gather CP" in row["notes"] else "ring",
        tp_overlap=2 if "async TP" in row["notes"] and "no async" not in row["notes"] else 1,
        bucket_mb=500.0,
    ).without_idle()  # fmt: skip


def _stages(layers: int, stages: int) -> str:
    """Layers per stage where embedding and head stand for a layer each, as in Llama 3's 126 of 128; else the default."""
    each, rest = divmod(layers + 2, stages)
    if rest or each < 2 or layers % stages == 0:
        return ""
    return "-".join(map(str, [each - 1, *[each] * (stages - 2), each - 1]))


def _step_batch(row: Row, micro: int, dp: int, pp: int) -> int:
    found = re.search(r"gradient accumulation (\d+)", row["notes"])
    if found:
        return micro * dp * int(found[1])
    if pp > 1 and "torchtitan" not in row["source"]:
        raise ConfigError("the row gives no global batch")
    return micro * dp


def _precision(row: Row) -> str:
    text = row["precision"].lower()
    if not text:
        return "fp8" if "Megatron-Bridge" in row["source"] else "bf16"
    if "fp4" in text:
        return "fp4"
    return "fp8" if "fp8" in text or "float8" in text else "bf16"


def hardware_flops(model: ModelConfig, batch: int, seq: int) -> float:
    """FLOPs of a step of a GPT with full recomputation as the Megatron papers count them (Narayanan et al. 2021)."""
    layers, hidden, vocab = model.num_layers, model.dim, model.vocab_size
    return 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))


def _seconds(row: Row, model: ModelConfig, layout: Layout, seq: int) -> float:
    if found := re.search(r"iteration ([\d.]+) s", row["notes"]):
        return float(found[1])
    if "SC21" in row["source"]:
        return hardware_flops(model, layout.global_batch, seq) / (
            float(row["tflops_per_gpu"]) * 1e12 * layout.world_size
        )
    if row["tokens_per_s_per_gpu"]:
        return layout.global_batch * seq / (float(row["tokens_per_s_per_gpu"]) * layout.world_size)
    if row["mfu"] and "nanotron" in row["source"]:  # its formula: full attention, head counted
        peak = find_chip("h100").peak("bf16")
        flops = model.flops_per_token(seq, convention="full") * layout.global_batch * seq
        return flops / (float(row["mfu"]) / 100 * peak * layout.world_size)
    if row["tflops_per_gpu"] and ("model_table" in row["source"] or "Llama 3 report" in row["source"]):
        convention: Literal["causal", "full"] = "full" if "model_table" in row["source"] else "causal"
        flops = model.flops_per_token(seq, convention=convention) * layout.global_batch * seq
        return flops / (float(row["tflops_per_gpu"]) * 1e12 * layout.world_size)
    raise ConfigError("the row gives neither a step time nor tokens per second")
