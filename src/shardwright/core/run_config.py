"""`RunConfig`: one run as pydantic models, read from TOML, changed by ``--set section.key=value``.

>>> config = RunConfig.load("examples/tiny.toml", sets=["optim.lr=1e-3"], layout="dp=2")  # doctest: +SKIP
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from shardwright.core.layout import Layout, layout_values
from shardwright.core.model_config import ModelConfig
from shardwright.core.suggest import did_you_mean
from shardwright.errors import ConfigError

Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)


class Source(Section):
    """One source of tokens: text files, folders and globs, a dataset folder, or the prefix of an indexed dataset.

    Two need no file: ``python:library`` (the source files of the running Python's standard library) and
    ``synthetic:sentences`` (sentences made on the spot).
    """

    path: str
    weight: float = Field(default=1.0, gt=0)
    """Share of the samples, in proportion to the other sources'."""
    format: Literal["text", "chat"] = "text"
    """``chat``: a .jsonl file with a list of messages (``role``, ``content``) in each line; only answers are learned."""
    field: str = Field(default_factory=lambda data: "messages" if data.get("format") == "chat" else "text")
    """Name of the text, or of the messages, in a .jsonl or .parquet record."""
    valid_path: str | None = None
    """Held-out tokens for an indexed dataset without a validation part of its own."""


class DataConfig(Section):
    sources: tuple[Source, ...] = Field(min_length=1)
    seq_len: int = Field(default=256, ge=2)
    tokenizer: str | None = None
    """A tokenizer.json or a folder with one; None trains a BPE tokenizer of the model's vocabulary on the text."""
    chat_template: str | None = None
    """``chatml`` or a file with a Jinja2 template, for sources with ``format = "chat"``; None takes the tokenizer's."""
    cache: str | None = None
    """Folder of tokenised datasets; None puts it beside the run folder."""
    valid_fraction: float = Field(default=0.02, ge=0, lt=1)
    cross_documents: bool = False
    """Let attention and targets cross document borders."""
    prefetch: int = Field(default=2, ge=1)
    workers: int = Field(default=1, ge=1)

    @field_validator("sources", mode="before")
    @classmethod
    def _plain_paths(cls, value: Any) -> Any:
        """``sources = "text.txt"`` and ``sources = ["a", "b"]`` are short for tables with a path."""
        items = [value] if isinstance(value, str) else value
        return [{"path": item} if isinstance(item, str) else item for item in items] if isinstance(items, list) else items


class OptimConfig(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0)
    clip: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 switches clipping off."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the decay, as a share of ``lr``."""
    delay_after: int = Field(default=40, ge=0)
    """Steps before the layout's ``delayed_update`` begins: early updates are too large to be a step late."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps in which WSD decays."""


class RouterConfig(Section):
    """How routers train. The auxiliary loss's weight is the model's ``moe.aux_coefficient``."""

    balance: Literal["microbatch", "sequence", "global"] = "microbatch"
    """Over which tokens the auxiliary loss balances: each micro-batch (of all data-parallel ranks), each sequence, or
    the whole global batch (as far as it has been seen when a micro-batch's backward begins)."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the mean squared log-sum-exp of the logits (ST-MoE, arXiv 2202.08906)."""
    bias_rate: float = Field(default=0.001, ge=0)
    """Change of the correction bias in a step, where the model has one (DeepSeek-V3); 0 keeps it."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """Router inputs are multiplied by uniform noise in [1 - jitter, 1 + jitter]."""
    dtype: Literal["fp32", "fp64"] = "fp32"
    """Of logits and scores; fp64 in a model of fp64."""
    drop_by: Literal["position", "probability"] = "position"
    """Which tokens an expert over its capacity (``layout.moe``) keeps: the first, or those with the highest scores."""


class TrainConfig(Section):
    steps: int = Field(default=100, ge=1)
    seed: int = Field(default=0, ge=0)
    run_dir: str = "runs/default"
    init_from: str | None = None
    """A Hugging Face folder or checkpoint whose weights start the run."""
    eval_every: int = Field(default=0, ge=0)
    """Evaluate on held-out text every so many steps (0: only at the end)."""
    eval_batches: int = Field(default=0, ge=0)
    """Batches of each evaluation (0: the whole held-out text)."""
    save_every: int = Field(default=0, ge=0)
    """Save a checkpoint every so many steps (0: only at the end)."""
    keep_last: int = Field(default=2, ge=1)
    keep_every: int = Field(default=0, ge=0)
    """Keep the checkpoints of steps that this divides, however old (0: none)."""
    checkpoint_url: str | None = None
    """Copy complete checkpoints there too, for instance s3://bucket/run (fsspec); ``--resume auto`` looks there as well."""
    async_save: bool = True
    """Write checkpoints in the background; the last one of a run is waited for."""
    async_lag_steps: int | None = Field(default=None, ge=1)
    """Steps that may pass until a checkpoint in the background is complete; then training waits for it. What a kill costs is
    at most one interval (``save_every``) and these steps. None: half an interval, at least one step."""
    elastic: bool = False
    """Under torchrun with another number of ranks: change dp, and keep the sequences of a step by accumulation. Where agents
    may join later (``--nnodes 1:4``), start them with ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: with the store that they share
    otherwise, an agent that comes when the others have begun waits for an address that it is never told."""
    shard_gb: float = Field(default=5.0, gt=0)
    """Largest file of a checkpoint, in 10^9 bytes."""
    compile: bool = False
    """torch.compile each block."""
    attention: Literal["fused", "scores"] = "fused"
    """``scores`` makes the scores as tensors and drops of their softmax, as GPT-2 was trained: slow and large, to compare."""
    loss_chunk: int = Field(default=0, ge=0)
    """Tokens whose logits the head makes at a time; backward makes them again. 0 keeps all of a micro-batch's logits."""
    freeze: tuple[str, ...] = ()
    """Name prefixes of parameters that are not trained, for instance "embedding." or "blocks.0."."""
    on_nonfinite: Literal["stop", "skip", "back"] = "stop"
    """What all ranks do when the gradient norm is not finite, or a spike: stop, leave the step out, or go back to the last
    checkpoint and pass over the samples read since (Chowdhery et al. 2022, section 5.1)."""
    spike_factor: float = Field(default=0.0, ge=0)
    """A gradient norm this many times the median of the last steps is a spike (0: none is)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak of one device for MFU; None takes the chip's fact, or measures a matrix product on CPU."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each rank; None shares the cores."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Longest wait for another rank."""
    stop_grace_s: float = Field(default=60.0, gt=0)
    """After Ctrl-C or SIGTERM: time for the step under way and the save, then the ranks are killed. A scheduler that sends
    SIGTERM has a limit of its own (srun's KillWait, torchrun's 30 s)."""

    @property
    def save_lag(self) -> int:
        """``async_lag_steps`` resolved; 0 where saves are waited for."""
        if not self.async_save:
            return 0
        return max(1, self.save_every // 2) if self.async_lag_steps is None else self.async_lag_steps


class RunConfig(Section):
    """One run: model, data, optimizer, training, routers and layout."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    router: RouterConfig = RouterConfig()
    layout: Layout = Layout()

    @field_validator("model", mode="before")
    @classmethod
    def _read_model(cls, value: Any) -> Any:
        if not isinstance(value, (str, Mapping, ModelConfig)):
            raise ConfigError(f"model={value!r} is neither a name nor a table; write model = \"tiny\" or a [model] section")
        return value if isinstance(value, ModelConfig) else ModelConfig.load(value)

    @field_validator("layout", mode="before")
    @classmethod
    def _read_layout(cls, value: Any) -> Any:
        if isinstance(value, str):
            return Layout.parse(value)
        return Layout.of(dict(value)) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _fits_together(self) -> RunConfig:
        self.layout.check_model(self.model)
        if self.model.position == "learned" and self.data.seq_len > self.model.max_positions:
            raise ConfigError(
                f"data.seq_len={self.data.seq_len} is longer than the model's {self.model.max_positions} learned "
                "positions; use a shorter seq_len or a larger model.max_positions"
            )
        if self.optim.warmup_steps > self.train.steps:
            raise ConfigError(
                f"optim.warmup_steps={self.optim.warmup_steps} is more than train.steps={self.train.steps}; "
                "warm up for fewer steps"
            )
        return self

    @classmethod
    def load(cls, path: str | Path, sets: Sequence[str] = (), layout: str | None = None) -> RunConfig:
        """Read a TOML file, apply ``section.key=value`` changes and a layout in text form. Raises `ConfigError`."""
        file = Path(path)
        if not file.exists():
            raise ConfigError(f"run file {file} does not exist; give a TOML file such as examples/tiny.toml")
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not TOML: {error}; see examples/tiny.toml") from None
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None
        return cls.of(table, sets, layout)

    @classmethod
    def of(cls, table: Mapping[str, Any], sets: Sequence[str] = (), layout: str | None = None) -> RunConfig:
        """Build from a mapping (a parsed TOML file). Raises `ConfigError`."""
        values = {key: dict(value) if isinstance(value, Mapping) else value for key, value in table.items()}
        for change in sets:
            _apply(values, change)
        if layout is not None:
            values["layout"] = {**_layout_table(values.get("layout", {})), **layout_values(layout)}
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    def for_world(self, num_processes: int) -> RunConfig:
        """The run on another number of processes, if it is ``train.elastic``; raises `LayoutError` where that cannot be."""
        if not self.train.elastic or num_processes == self.layout.world_size:
            return self
        return self.model_copy(update={"layout": self.layout.for_world(num_processes)})

    def to_table(self) -> dict[str, Any]:
        """The whole run as plain values: what a run folder's ``config.toml`` holds, readable by :meth:`of`."""
        table = self.model_dump(mode="json", exclude_none=True, exclude={"layout"})
        table["layout"] = str(self.layout)
        return table


def _layout_table(layout: Any) -> dict[str, Any]:
    if isinstance(layout, (str, Layout)):
        return dict(layout_values(str(layout)))
    if isinstance(layout, Mapping):
        return dict(layout)
    raise ConfigError(f'layout={layout!r} is neither text nor a table; write for instance layout = "dp=2"')


def _apply(values: dict[str, Any], change: str) -> None:
    key, separator, text = change.partition("=")
    section, dot, name = key.strip().partition(".")
    if not separator or not section or (dot and not name):
        raise ConfigError(f"--set {change!r} is not section.key=value; write for instance --set optim.lr=1e-3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # plain text needs no quotes
    if not dot:
        values[section] = value
        return
    table = values.setdefault(section, {})
    if section == "layout":
        table = values[section] = _layout_table(table)
    elif isinstance(table, str) and section == "model":
        table = values[section] = {"preset": table}
    if not isinstance(table, dict):
        raise ConfigError(f"--set {change}: {section} is not a table; set it whole with --set {section}=...")
    table[name] = value


_TABLES: dict[str, type[BaseModel]] = {"data": DataConfig, "optim": OptimConfig, "train": TrainConfig, "router": RouterConfig}


def _explain(error: ValidationError) -> str:
    """One complaint in one line: an unknown key, with the nearest right name, before all others (it may be their cause)."""
    complaints = error.errors(include_url=False)
    first = next((found for found in complaints if found["type"] == "extra_forbidden"), complaints[0])
    parts = [str(part) for part in first["loc"]]
    where = ".".join(parts)
    if first["type"] == "extra_forbidden":
        table: type[BaseModel] = RunConfig if len(parts) == 1 else _TABLES.get(parts[0], Source)
        if parts[:2] == ["data", "sources"]:
            table = Source
        return f"unknown key {where}; {did_you_mean(parts[-1], table.model_fields)}"
    if first["type"] == "missing":
        return f"{where} is missing; add it (see examples/tiny.toml)"
    if first["type"] == "model_type":
        return f"{where}={first['input']!r} is not a table; write its keys below [{where}] (see examples/tiny.toml)"
    if first["type"] == "tuple_type":
        return f"{where}={first['input']!r} is not a list; write for instance {where} = [...]"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{where}={first['input']!r}: {message}"
