"""Hugging Face model folders: ``config.json``, safetensors and tokenizer files, for the families in `FORMATS`.

One table per format says which of our parameters a tensor of the file holds; both directions read it. Our names are
those of `parameter_specs`. Nothing is guessed: a name that is missing, unexpected or of another shape is an error.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import Spec, parameter_specs
from shardwright.errors import CheckpointError, ModelConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)

Shapes = Mapping[str, tuple[int, ...]]


# -- names -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face file: our ``parts`` joined along dim 0, then transposed if ``transposed``.

    ``expert`` (number, first row, end): these rows of one expert of a stacked part instead. ``turned`` (rows of a head, the
    last of them that are rotated): the file has their two halves interleaved, as pairs.
    """

    name: str
    parts: tuple[str, ...]
    transposed: bool = False
    expert: tuple[int, int, int] | None = None
    turned: tuple[int, int] | None = None

    def shape(self, specs: Mapping[str, Spec]) -> tuple[int, ...]:
        """The shape in the file."""
        if self.expert is not None:
            _, start, stop = self.expert
            return (stop - start, specs[self.parts[0]].shape[2])
        rows = sum(specs[part].shape[0] for part in self.parts)
        shape = (rows, *specs[self.parts[0]].shape[1:])
        return shape[::-1] if self.transposed else shape

    def join(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Our parts -> the tensor of the file (a view where that is possible)."""
        if self.expert is not None:
            number, start, stop = self.expert
            return weights[self.parts[0]][number, start:stop]
        parts = [weights[part] for part in self.parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.turned is not None:
            whole = self._reordered(whole, (2, -1))
        return whole.t() if self.transposed else whole

    def split(self, tensor: Tensor, specs: Mapping[str, Spec], weights: dict[str, Tensor]) -> None:
        """Put our parts of the file's tensor, contiguous, into ``weights``."""
        if self.expert is not None:
            (part,), (number, start, stop) = self.parts, self.expert
            if part not in weights:
                weights[part] = tensor.new_empty(specs[part].shape)
            weights[part][number, start:stop] = tensor
            return
        whole = tensor.t() if self.transposed else tensor
        if self.turned is not None:
            whole = self._reordered(whole, (-1, 2))
        pieces = torch.split(whole, [specs[part].shape[0] for part in self.parts])
        weights |= {part: piece.contiguous() for part, piece in zip(self.parts, pieces, strict=True)}

    def _reordered(self, whole: Tensor, halves: tuple[int, int]) -> Tensor:
        """``whole`` with the rotated rows of each head, seen as ``halves``, transposed."""
        assert self.turned is not None
        size, rotated = self.turned
        heads = whole.reshape(-1, size, *whole.shape[1:])
        kept, turned = heads.split([size - rotated, rotated], dim=1)
        swapped = turned.unflatten(1, halves).transpose(1, 2).flatten(1, 2)
        return torch.cat([kept, swapped], dim=1).reshape(whole.shape)


@dataclass(frozen=True)
class _Rule:
    """A module of the file and the modules of ours that it holds; ``{}`` is the layer's number.

    ``conv1d``: the weight is stored as (in, out), the way GPT-2's Conv1D keeps it. ``rows``: a second ``{}`` of the module is
    an expert's number, and it holds its ``gate`` or ``up`` rows, or all of them, of our stacked weight. ``turned``: the rows of
    a query head (``q``) or of the shared key (``k``) are rotated. ``kinds``: what the module's tensors are called.
    """

    module: str
    ours: tuple[str, ...]
    conv1d: bool = False
    rows: str = ""
    turned: str = ""
    kinds: tuple[tuple[str, str], ...] = (("weight", "weight"), ("bias", "bias"))

    def tensors(self, layer: int | None, specs: Mapping[str, Spec], config: ModelConfig) -> Iterator[HFTensor]:
        for theirs, kind in self.kinds:
            parts = tuple(f"{module}.{kind}".format(layer) for module in self.ours)
            if parts[0] not in specs:
                continue
            if self.rows:
                yield from self._experts(f"{self.module}.{theirs}", layer, specs[parts[0]])
                continue
            name = f"{self.module}.{theirs}".format(layer)
            yield HFTensor(name, parts, self.conv1d and kind == "weight", turned=self._turned(config))

    def _experts(self, name: str, layer: int | None, spec: Spec) -> Iterator[HFTensor]:
        count, rows, _ = spec.shape
        start, stop = {"gate": (0, rows // 2), "up": (rows // 2, rows), "all": (0, rows)}[self.rows]
        for number in range(count):
            yield HFTensor(name.format(layer, number), (spec.name,), expert=(number, start, stop))

    def _turned(self, config: ModelConfig) -> tuple[int, int] | None:
        if not self.turned or config.mla is None:
            return None
        mla = config.mla
        return (config.head_dim if self.turned == "q" else mla.kv_lora_rank + mla.rope_head_dim, mla.rope_head_dim)


def _gated(module: str, ours: str) -> tuple[_Rule, ...]:
    return tuple(_Rule(f"{module}.{part}_proj", (f"{ours}.{part}",)) for part in ("gate", "up", "down"))


def _routed(module: str, gate: str, up: str, down: str) -> tuple[_Rule, ...]:
    """The experts of a module, which the file holds one by one."""
    ours = "blocks.{}.moe.experts"
    return (
        _Rule(f"{module}.experts.{{}}.{gate}", (f"{ours}.up",), rows="gate"),
        _Rule(f"{module}.experts.{{}}.{up}", (f"{ours}.up",), rows="up"),
        _Rule(f"{module}.experts.{{}}.{down}", (f"{ours}.down",), rows="all"),
        _Rule(f"{module}.gate", ("blocks.{}.moe.router",), kinds=_ROUTER),
    )


_ROUTER = (("weight", "weight"), ("e_score_correction_bias", "correction"))
_ROTARY = (
    _Rule("model.embed_tokens", ("embedding.token",)),
    _Rule("model.layers.{}.input_layernorm", ("blocks.{}.attention_norm",)),
    _Rule("model.layers.{}.self_attn.q_proj", ("blocks.{}.attention.q",)),
    _Rule("model.layers.{}.self_attn.k_proj", ("blocks.{}.attention.k",)),
    _Rule("model.layers.{}.self_attn.v_proj", ("blocks.{}.attention.v",)),
    _Rule("model.layers.{}.self_attn.q_norm", ("blocks.{}.attention.q_norm",)),
    _Rule("model.layers.{}.self_attn.k_norm", ("blocks.{}.attention.k_norm",)),
    _Rule("model.layers.{}.self_attn.o_proj", ("blocks.{}.attention.out",)),
    _Rule("model.layers.{}.post_attention_layernorm", ("blocks.{}.mlp_norm",)),
    *_gated("model.layers.{}.mlp", "blocks.{}.mlp"),
    _Rule("model.norm", ("head.norm",)),
    _Rule("lm_head", ("head",)),
)
_GPT2 = (
    _Rule("transformer.wte", ("embedding.token",)),
    _Rule("transformer.wpe", ("embedding.position",)),
    _Rule("transformer.h.{}.ln_1", ("blocks.{}.attention_norm",)),
    _Rule(
        "transformer.h.{}.attn.c_attn",
        ("blocks.{}.attention.q", "blocks.{}.attention.k", "blocks.{}.attention.v"),
        conv1d=True,
    ),
    _Rule("transformer.h.{}.attn.c_proj", ("blocks.{}.attention.out",), conv1d=True),
    _Rule("transformer.h.{}.ln_2", ("blocks.{}.mlp_norm",)),
    _Rule("transformer.h.{}.mlp.c_fc", ("blocks.{}.mlp.up",), conv1d=True),
    _Rule("transformer.h.{}.mlp.c_proj", ("blocks.{}.mlp.down",), conv1d=True),
    _Rule("transformer.ln_f", ("head.norm",)),
    _Rule("lm_head", ("head",)),
)
_LATENT = (
    _Rule("model.layers.{}.self_attn.q_proj", ("blocks.{}.attention.q",), turned="q"),
    _Rule("model.layers.{}.self_attn.q_a_proj", ("blocks.{}.attention.q_down",)),
    _Rule("model.layers.{}.self_attn.q_a_layernorm", ("blocks.{}.attention.q_norm",)),
    _Rule("model.layers.{}.self_attn.q_b_proj", ("blocks.{}.attention.q_up",), turned="q"),
    _Rule("model.layers.{}.self_attn.kv_a_proj_with_mqa", ("blocks.{}.attention.kv_down",), turned="k"),
    _Rule("model.layers.{}.self_attn.kv_a_layernorm", ("blocks.{}.attention.kv_norm",)),
    _Rule("model.layers.{}.self_attn.kv_b_proj", ("blocks.{}.attention.kv_up",)),
)
_EXPERTS = _routed("model.layers.{}.mlp", "gate_proj", "up_proj", "down_proj")
_MIXTRAL = (*_ROTARY, *_routed("model.layers.{}.block_sparse_moe", "w1", "w3", "w2"))
_QWEN_MOE = (
    *_ROTARY,
    *_EXPERTS,
    *_gated("model.layers.{}.mlp.shared_expert", "blocks.{}.moe.shared"),
    _Rule("model.layers.{}.mlp.shared_expert_gate", ("blocks.{}.moe.shared_gate",)),
)
_DEEPSEEK = (
    *(rule for rule in _ROTARY if not rule.module.endswith(("q_proj", "q_norm"))),
    *_LATENT,
    *_EXPERTS,
    *_gated("model.layers.{}.mlp.shared_experts", "blocks.{}.moe.shared"),
)
FORMATS: Mapping[str, tuple[_Rule, ...]] = MappingProxyType(
    {
        "llama": _ROTARY, "qwen2": _ROTARY, "qwen3": _ROTARY, "gpt2": _GPT2, "mixtral": _MIXTRAL, "qwen2_moe": _QWEN_MOE,
        "qwen3_moe": _QWEN_MOE, "deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK,
    }
)  # fmt: skip
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Tensors of older files that are not parameters, by how their names end."""


def hf_names(config: ModelConfig) -> tuple[HFTensor, ...]:
    """Every tensor of the model's Hugging Face file; raises `CheckpointError` if the format cannot hold the model."""
    if config.family not in FORMATS:
        raise CheckpointError(
            f"{config.name}: weights of family {config.family!r} cannot be read or written yet; "
            f"supported: {', '.join(FORMATS)}"
        )
    specs = parameter_specs(config)
    found: list[HFTensor] = []
    for rule in FORMATS[config.family]:
        for layer in range(config.num_layers) if "{}" in rule.module else (None,):
            found += rule.tensors(layer, specs, config)
    lost = specs.keys() - {part for tensor in found for part in tensor.parts}
    if lost:
        raise CheckpointError(
            f"{config.name}: files of family {config.family!r} have no place for {_some(lost)}; choose another family"
        )
    return tuple(found)


def check_shapes(source: str, expected: Shapes, found: Shapes, advice: str) -> None:
    """Raise a `CheckpointError` that lists the names that are missing, unexpected or of another shape."""
    both = expected.keys() & found.keys()
    other = [f"{name} {found[name]} instead of {expected[name]}" for name in both if found[name] != expected[name]]
    lists = {
        "missing": expected.keys() - found.keys(),
        "unexpected": found.keys() - expected.keys(),
        "of another shape": other,
    }
    problems = [f"{len(names)} {what}: {_some(names)}" for what, names in lists.items() if names]
    if problems:
        raise CheckpointError(f"{source} does not match the model: {'; '.join(problems)}; {advice}")


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _some(names: Any, limit: int = 6) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


# -- tensors ---------------------------------------------------------------------------------------


def to_hf_tensors(config: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our weights (full tensors by our names) -> contiguous tensors by the names of the family's files."""
    specs = parameter_specs(config)
    expected = {name: spec.shape for name, spec in specs.items()}
    check_shapes(f"{config.name}: the weights given", expected, shapes(weights), "give every parameter in full")
    return {tensor.name: tensor.join(weights).contiguous() for tensor in hf_names(config)}


def from_hf_tensors(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of the family's files -> full weights by our names, in the dtype of the file.

    Strict: what is missing, unexpected or of another shape is listed in a `CheckpointError`. Left out without a word
    are known buffers, heads for further tokens (DeepSeek-V3's layers behind the last) and, in a tied model, a head that
    equals the embedding.
    """
    return _from_hf(config, tensors, f"{config.name}: the file")


def _from_hf(config: ModelConfig, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    specs, names = parameter_specs(config), hf_names(config)
    found = _by_full_names(config, tensors, names, source)
    expected = {tensor.name: tensor.shape(specs) for tensor in names}
    check_shapes(source, expected, shapes(found), "check that config.json belongs to these weights")
    whole = sorted(name for name, tensor in found.items() if not tensor.is_floating_point())
    if whole:
        raise CheckpointError(f"{source} holds {_some(whole)} as integers; give weights that are not quantised")
    weights: dict[str, Tensor] = {}
    for tensor in names:
        tensor.split(found[tensor.name], specs, weights)
    return {name: weights[name] for name in specs}


def state_from_hf(config: ModelConfig, tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """`from_hf_tensors` of one kind of optimizer state: a parameter that is not trained may have none."""
    specs, names = parameter_specs(config), hf_names(config)
    found = _by_full_names(config, tensors, names, source)
    parts = {part for tensor in names if tensor.name in found for part in tensor.parts}
    given = [tensor for tensor in names if not parts.isdisjoint(tensor.parts)]  # of a stack of experts all or none
    expected = {tensor.name: tensor.shape(specs) for tensor in given}
    check_shapes(source, expected, shapes(found), "give the state of this model under the names of its weights")
    state: dict[str, Tensor] = {}
    for tensor in given:
        tensor.split(found[tensor.name], specs, state)
    return {name: state[name] for name in specs if name in state}


def _by_full_names(
    config: ModelConfig, tensors: Mapping[str, Tensor], names: Sequence[HFTensor], source: str
) -> dict[str, Tensor]:
    """What there is of the model, without known buffers, further heads and the second name of a tied weight."""
    found = {
        _full_name(config, name): tensor
        for name, tensor in tensors.items()
        if not name.endswith(_BUFFERS) and not _is_further_head(config, name)
    }
    if config.tied_head and "lm_head.weight" in found:
        embedding = next(tensor.name for tensor in names if tensor.parts == ("embedding.token.weight",))
        if embedding in found and not torch.equal(found.pop("lm_head.weight"), found[embedding]):
            raise CheckpointError(
                f"{source} holds an lm_head.weight that differs from {embedding}, but config.json says that they are "
                "tied; set tie_word_embeddings to false there"
            )
    return found


def _is_further_head(config: ModelConfig, name: str) -> bool:
    """Whether the tensor belongs to DeepSeek-V3's prediction of tokens after the next one, kept as layers behind the last."""
    parts = name.split(".")
    layer = parts[2] if config.family == "deepseek_v3" and parts[:2] == ["model", "layers"] else ""
    return layer.isdecimal() and int(layer) >= config.num_layers


def _full_name(config: ModelConfig, name: str) -> str:
    """GPT-2 files may leave out the prefix ``transformer.``."""
    bare = config.family == "gpt2" and not name.startswith(("transformer.", "lm_head."))
    return f"transformer.{name}" if bare else name


# -- folders ---------------------------------------------------------------------------------------


def load_hf(folder: Path | str) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model and its full weights by our names; raises `CheckpointError` that says what is wrong with the folder."""
    folder = Path(folder)
    config = read_config(folder)
    return config, _from_hf(config, read_tensors(folder), str(folder))


def read_config(folder: Path) -> ModelConfig:
    """The model of the folder's ``config.json``."""
    if not folder.is_dir():
        raise CheckpointError(f"model folder {folder} does not exist; give a folder with config.json and {WEIGHTS}")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; give a Hugging Face model folder")
    try:
        return ModelConfig.load(folder)
    except ModelConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of ``model.safetensors``, or of the files that its index names."""
    if (folder / WEIGHTS).is_file():
        return read_safetensors(folder / WEIGHTS)
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}; other formats are not read, save the weights as safetensors"
        )
    tensors: dict[str, Tensor] = {}
    for name in _index_files(index):
        tensors |= read_safetensors(folder / name)
    return tensors


def _index_files(index: Path) -> list[str]:
    try:
        files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index with a weight_map ({error}); download it again") from None
    if outside := [name for name in files if Path(name).name != name]:
        raise CheckpointError(f"{index} names {outside[0]!r}, which is not a file of the same folder")
    return files


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file; raises `CheckpointError` if it is missing, truncated or something else."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist, though the folder needs it; copy the whole folder again")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or not safetensors ({error}); copy or save it again") from None


def save_hf(
    folder: Path | str,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    tokenizer_folder: Path | str | None = None,
) -> None:
    """Write a folder that `load_hf` and transformers read: config.json, model.safetensors and the tokenizer's files.

    ``weights`` are full tensors by our names; ``dtype`` converts them. Raises `CheckpointError` (or `ModelConfigError`
    from `ModelConfig.to_hf`) before anything is written if the format cannot hold the model.
    """
    try:
        write_files(Path(folder), config, weights, dtype=dtype, tokenizer_folder=tokenizer_folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}; give another folder") from error


def write_files(
    folder: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    tokenizer_folder: Path | str | None = None,
) -> None:
    """`save_hf` that lets OSError through."""
    tensors = {name: tensor.detach() for name, tensor in to_hf_tensors(config, weights).items()}
    dtype = dtype or next(iter(tensors.values())).dtype
    description = config_text(config, dtype)
    check_tokenizer(tokenizer_folder)
    folder.mkdir(parents=True, exist_ok=True)
    specs = parameter_specs(config)
    wide = {tensor.name for tensor in hf_names(config) if specs[tensor.parts[0]].buffer}  # a correction bias stays fp32
    converted = {name: tensor.to(torch.float32 if name in wide else dtype) for name, tensor in tensors.items()}
    write_safetensors(folder / WEIGHTS, converted)
    write_text(folder / "config.json", description)
    copy_tokenizer(tokenizer_folder, folder)


def config_text(config: ModelConfig, dtype: torch.dtype) -> str:
    """What a ``config.json`` holds; raises `ModelConfigError` for a model that the family cannot describe."""
    return json.dumps(config.to_hf() | {"torch_dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"


def check_tokenizer(source: Path | str | None) -> None:
    """Raise `CheckpointError` for a tokenizer's folder that is not there."""
    if source is not None and not Path(source).is_dir():
        raise CheckpointError(f"tokenizer folder {source} does not exist; give the folder of tokenizer.json")


def copy_tokenizer(source: Path | str | None, folder: Path) -> None:
    """Copy the tokenizer's files; raises OSError."""
    if source is not None and Path(source).resolve() != folder.resolve():
        for name in TOKENIZER_FILES:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors (contiguous, any device) under another name first; raises OSError, also for a full disk."""
    aside = path.with_name(f"{path.name}.partial")
    try:
        save_file({name: tensor.to("cpu") for name, tensor in tensors.items()}, aside, metadata={"format": "pt"})
    except SafetensorError as error:  # carries the reason as text only
        raise OSError(str(error)) from error
    os.replace(aside, path)


def write_text(path: Path, text: str) -> None:
    """Write a text file under another name first; raises OSError."""
    aside = path.with_name(f"{path.name}.partial")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)
