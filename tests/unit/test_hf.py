"""Hugging Face folders: logits equal transformers' in both directions, and strict, clear errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwright.checkpoint import hf
from shardwright.checkpoint.hf import from_hf_tensors, hf_names, load_hf, save_hf, to_hf_tensors
from shardwright.checkpoint.io import copy_weights
from shardwright.comm.mesh import Mesh
from shardwright.core.model_config import ModelConfig
from shardwright.core.specs import parameter_specs
from shardwright.errors import CheckpointError, ModelConfigError
from shardwright.model.generate import generate, generate_by_recomputing
from shardwright.model.init import full_value
from shardwright.model.transformer import Transformer
from shardwright.ops.attention import CausalAttend

NUM_TOKENS = 48
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 112,
    "max_position_embeddings": 256,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
# Name -> the class of transformers' config and its arguments.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3": (
        "LlamaConfig",
        {"rope_parameters": {"rope_theta": 5e4, **LLAMA3, "original_max_position_embeddings": 16}},
    ),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": {"rope_theta": 1e4, **YARN}, "tie_word_embeddings": True}),
    "llama-yarn-mscale": (
        "LlamaConfig",
        {"rope_parameters": {"rope_theta": 1e4, **YARN, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "llama-yarn-one-mscale": ("LlamaConfig", {"rope_parameters": {"rope_theta": 1e4, **YARN, "mscale": 0.5}}),
    "llama-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 3.0}, "head_dim": 24},
    ),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": (
        "Qwen2Config",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen3-tied": ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 32}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 96}),
    "gpt2-untied": (
        "GPT2Config",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "vocab_size": 96,
            "n_inner": 80,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "head_dim": 32,
        },
    ),
    "deepseek-v2": ("DeepseekV2Config", {**LATENT, "n_shared_experts": 2, "q_lora_rank": None, "v_head_dim": 24}),
    "deepseek-v2-groups": (
        "DeepseekV2Config",
        {
            **LATENT,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 4.0,
            "rope_parameters": {"rope_theta": 1e4, **YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            **LATENT,
            "n_group": 4,
            "topk_group": 2,
            "num_mtp_layers": 0,
            "rope_parameters": {"rope_theta": 1e4, **YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
}


class Reference:
    """transformers, imported once and kept off the network."""

    def __init__(self) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.library = transformers

    def random_model(self, name: str) -> Any:
        """A random model whose biases and norms are not the usual zeros and ones."""
        config_class, arguments = MODELS[name]
        shape = {} if config_class == "GPT2Config" else SHAPE
        config = getattr(self.library, config_class)(**{**shape, **arguments}, attn_implementation="eager")
        torch.manual_seed(0)
        model = self.library.AutoModelForCausalLM.from_config(config).eval()
        biases = [buffer for key, buffer in model.named_buffers() if key.endswith("correction_bias")]
        for parameter in [*model.parameters(), *biases]:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        return model

    def load(self, folder: Path) -> Any:
        model, info = self.library.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager"
        )
        assert not any(info.values()), info
        return model.eval()


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield Reference()


TOKENS = torch.randint(0, 96, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def their_logits(model: Any) -> Tensor:
    logits: Tensor = model(input_ids=TOKENS.unsqueeze(0)).logits[0]
    return logits


def our_model(config: ModelConfig, weights: dict[str, Tensor]) -> Transformer:
    mesh = Mesh.solo()
    model = Transformer(config, mesh)
    copy_weights(model.named_parameters(), model.specs, weights, mesh.layout, mesh.coordinates)
    return model


@torch.no_grad()
def our_logits(config: ModelConfig, weights: dict[str, Tensor]) -> Tensor:
    windows = [config.layer_window(layer) for layer in range(config.num_layers)]
    logits: Tensor = our_model(config, weights)(TOKENS, torch.arange(NUM_TOKENS), CausalAttend([NUM_TOKENS], windows))
    return logits


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_in_both_directions(name: str, reference: Reference, tmp_path: Path) -> None:
    theirs = reference.random_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    config, weights = load_hf(tmp_path / "theirs")
    expected = their_logits(theirs)
    assert_close(our_logits(config, weights), expected)
    save_hf(tmp_path / "ours", config, weights)
    assert_close(their_logits(reference.load(tmp_path / "ours")), expected)
    again, same = load_hf(tmp_path / "ours")
    assert again.model_copy(update={"name": config.name}) == config
    assert all(torch.equal(same[key], weights[key]) for key in weights)


def test_sharded_files_are_read(reference: Reference, tmp_path: Path) -> None:
    theirs = reference.random_model("qwen2")
    theirs.save_pretrained(tmp_path, max_shard_size="50KB")
    assert (tmp_path / hf.INDEX).is_file() and not (tmp_path / hf.WEIGHTS).exists()
    assert_close(our_logits(*load_hf(tmp_path)), their_logits(theirs))
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} does not exist"):
        load_hf(tmp_path)
    (tmp_path / hf.INDEX).write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(CheckpointError, match="not a file of the same folder"):
        load_hf(tmp_path)
    (tmp_path / hf.INDEX).write_text('{"weight_map": ')
    with pytest.raises(CheckpointError, match="not an index"):
        load_hf(tmp_path)


# -- without transformers --------------------------------------------------------------------------


def gpt2_config() -> ModelConfig:
    return ModelConfig(
        family="gpt2",
        vocab_size=24,
        dim=16,
        num_layers=2,
        num_heads=2,
        ffn_dim=40,
        max_positions=12,
        norm="layernorm",
        activation="gelu_tanh",
        position="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied_head=True,
    )


def llama_config(**changes: Any) -> ModelConfig:
    shape = {"vocab_size": 24, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 40}
    return ModelConfig(**{**shape, **changes})


def random_weights(config: ModelConfig) -> dict[str, Tensor]:
    return {name: full_value(spec, 0) + 0.1 for name, spec in parameter_specs(config).items()}


def test_gpt2_fuses_and_transposes() -> None:
    config = gpt2_config()
    weights = random_weights(config)
    tensors = to_hf_tensors(config, weights)
    assert tensors["transformer.h.1.attn.c_attn.weight"].shape == (16, 48)
    key = tensors["transformer.h.1.attn.c_attn.weight"][:, 16:32]
    assert torch.equal(key.t(), weights["blocks.1.attention.k.weight"])
    assert tensors["transformer.h.0.mlp.c_fc.weight"].shape == (16, 40)
    assert "lm_head.weight" not in tensors
    back = from_hf_tensors(config, tensors)
    assert list(back) == list(parameter_specs(config))
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_gpt2_without_prefix_and_with_buffers() -> None:
    config = gpt2_config()
    weights = random_weights(config)
    tensors = {name.removeprefix("transformer."): value for name, value in to_hf_tensors(config, weights).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 12, 12)
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    back = from_hf_tensors(config, tensors)
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_rotary_buffers_and_redundant_head() -> None:
    config = llama_config(tied_head=True)
    tensors = to_hf_tensors(config, random_weights(config))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert from_hf_tensors(config, tensors).keys() == parameter_specs(config).keys()
    tensors["lm_head.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match=r"differs from model\.embed_tokens\.weight.*tie_word_embeddings"):
        from_hf_tensors(config, tensors)


def test_every_problem_is_listed() -> None:
    config = llama_config()
    tensors = to_hf_tensors(config, random_weights(config))
    tensors["model.layers.0.mlp.wrong.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["lm_head.weight"] = torch.zeros(25, 16)
    with pytest.raises(CheckpointError) as caught:
        from_hf_tensors(config, tensors)
    message = str(caught.value)
    assert "1 missing: model.layers.0.mlp.up_proj.weight" in message
    assert "1 unexpected: model.layers.0.mlp.wrong.weight" in message
    assert "lm_head.weight (25, 16) instead of (24, 16)" in message
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"2 missing: lm_head\.weight, "):
        from_hf_tensors(config, tensors)


def test_integers_are_refused() -> None:
    config = llama_config()
    tensors = to_hf_tensors(config, random_weights(config))
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight as integers"):
        from_hf_tensors(config, tensors)


def test_a_model_that_its_family_cannot_hold_is_refused_before_writing(tmp_path: Path) -> None:
    config = llama_config(qk_norm=True)
    with pytest.raises(ModelConfigError, match="qk_norm"):
        save_hf(tmp_path / "out", config, random_weights(config))
    assert not (tmp_path / "out").exists()
    learned = llama_config(position="learned")
    with pytest.raises(CheckpointError, match=r"no place for embedding\.position\.weight"):
        hf_names(learned)
    with pytest.raises(CheckpointError, match="missing"):
        save_hf(tmp_path / "out", llama_config(), {})


def test_saved_folder(tmp_path: Path) -> None:
    """dtype, metadata, tokenizer files; parameters may be views of one flat buffer, as in training."""
    config = llama_config()
    flat = torch.randn(config.num_parameters())
    weights, start = {}, 0
    for name, spec in parameter_specs(config).items():
        weights[name] = flat[start : start + spec.numel].view(spec.shape).requires_grad_()
        start += spec.numel
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "unrelated.txt"):
        (source / name).write_text("{}")
    save_hf(tmp_path / "out", config, weights, dtype=torch.bfloat16, tokenizer_folder=source)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"}
    description = json.loads((tmp_path / "out" / "config.json").read_text())
    assert description["torch_dtype"] == "bfloat16" and description["architectures"] == ["LlamaForCausalLM"]
    header = (tmp_path / "out" / hf.WEIGHTS).read_bytes()[8:].split(b"}}")[0]
    assert b'"__metadata__":{"format":"pt"}' in header
    _, back = load_hf(tmp_path / "out")
    assert all(torch.equal(back[name], weights[name].to(torch.bfloat16)) for name in weights)
    with pytest.raises(CheckpointError, match="tokenizer folder"):
        save_hf(tmp_path / "other", config, weights, tokenizer_folder=tmp_path / "nowhere")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = llama_config()
    save_hf(tmp_path / "model", config, random_weights(config))
    return tmp_path / "model"


def test_missing_folder_and_config(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_hf(folder / "nowhere")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_hf(folder)


@pytest.mark.parametrize("content", ["", "[]", '{"model_type": "lama"}', '{"model_type": "llama"}'])
def test_wrong_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        load_hf(folder)
    assert "\n" not in str(caught.value)
    assert "lama" not in content or "llama" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 100, 3000, -1])
def test_truncated_weights(folder: Path, keep: int) -> None:
    path = folder / hf.WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated") as caught:
        load_hf(folder)
    assert "\n" not in str(caught.value)


def test_other_content(folder: Path) -> None:
    (folder / hf.WEIGHTS).write_bytes(b"PK" * 500)
    with pytest.raises(CheckpointError, match="truncated or not safetensors"):
        load_hf(folder)
    (folder / hf.WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="save the weights as safetensors"):
        load_hf(folder)


def test_tensors_of_another_model(folder: Path) -> None:
    tensors = load_file(folder / hf.WEIGHTS)
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / hf.WEIGHTS)
    with pytest.raises(CheckpointError, match=rf"{folder} does not match.*model\.norm\.weight"):
        load_hf(folder)


def test_save_on_a_file(folder: Path) -> None:
    config = llama_config()
    with pytest.raises(CheckpointError, match="cannot write"):
        save_hf(folder / "config.json", config, random_weights(config))


def latent_config() -> ModelConfig:
    mla = {"kv_lora_rank": 8, "q_lora_rank": 6, "nope_head_dim": 4, "rope_head_dim": 4, "v_head_dim": 4}
    moe = {"num_experts": 4, "top_k": 2, "expert_dim": 6, "score": "sigmoid", "bias_correction": True}
    shape = {"vocab_size": 24, "dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 40}
    return ModelConfig(family="deepseek_v3", mla=mla, moe=moe, **shape)


def test_experts_are_split_and_rotated_rows_interleaved() -> None:
    config = latent_config()
    weights = random_weights(config)
    tensors = to_hf_tensors(config, weights)
    up = weights["blocks.0.moe.experts.up.weight"]
    assert torch.equal(tensors["model.layers.0.mlp.experts.3.gate_proj.weight"], up[3, :6])
    assert torch.equal(tensors["model.layers.0.mlp.experts.2.up_proj.weight"], up[2, 6:])
    ours, theirs = weights["blocks.0.attention.kv_down.weight"], tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    assert torch.equal(theirs[8:], ours[[8, 10, 9, 11]]) and torch.equal(theirs[:8], ours[:8])
    queries = tensors["model.layers.0.self_attn.q_b_proj.weight"]
    assert torch.equal(queries[12:], weights["blocks.0.attention.q_up.weight"][[12, 14, 13, 15]])
    tensors["model.layers.1.embed_tokens.weight"] = torch.ones(24, 16)  # a head for the token after the next
    back = from_hf_tensors(config, tensors)
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    del tensors["model.layers.0.mlp.experts.1.down_proj.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.0\.mlp\.experts\.1\.down_proj\.weight"):
        from_hf_tensors(config, tensors)


# -- a real model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["babyllama-tok105", "moe-gsm8k-1.5m"])
def test_golden_continuations(name: str, shared: Path, tmp_path: Path) -> None:
    source = shared / "data" / "models" / name
    if not source.is_dir():
        pytest.skip(f"needs ../shared/data/models/{name}, a real model with golden continuations")
    golden = json.loads((source / "golden.json").read_text())
    model = our_model(*load_hf(source))
    assert len(golden["results"]) == 3
    for case in golden["results"]:
        prompt, new = case["prompt_ids"], case["new_ids"]
        assert list(generate(model, prompt, len(new))) == new
        assert list(generate_by_recomputing(model, prompt, 8)) == new[:8]
        ids = torch.tensor(prompt + new)
        with torch.no_grad():
            logits = model(ids, torch.arange(len(ids)), CausalAttend([len(ids)]))
        chosen = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[-len(new) :, 0]
        assert float((chosen - torch.tensor(case["new_logprobs"])).abs().max()) < 1e-3
    save_hf(tmp_path / "copy", *load_hf(source), tokenizer_folder=source)
    config, weights = load_hf(tmp_path / "copy")
    assert all(torch.equal(value, weights[key]) for key, value in load_hf(source)[1].items())
    assert (tmp_path / "copy" / "tokenizer.json").is_file() and config.vocab_size == model.config.vocab_size
