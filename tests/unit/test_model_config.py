"""ModelConfig, presets and clusters: counts against independent numbers, Hugging Face configs both ways, messages."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardwright.core.cluster import CHIPS, Cluster, find_chip
from shardwright.core.model_config import ModelConfig
from shardwright.core.presets import PRESETS, preset
from shardwright.errors import ConfigError, ModelConfigError

SMALL: dict[str, Any] = {
    "vocab_size": 64, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_dim": 48,
    "max_positions": 64, "eos_id": 2,
}  # fmt: skip
MOE: dict[str, Any] = {"num_experts": 8, "top_k": 2, "expert_dim": 16, "aux_coefficient": 0.01}
MLA = {"kv_lora_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6}
LATENT = {"num_kv_heads": 4, "head_dim": 12}
LLAMA3 = {"kind": "llama3", "factor": 8, "original_max_positions": 16}
YARN = {"kind": "yarn", "factor": 4, "original_max_positions": 16, "mscale": 1.0, "mscale_all_dim": 0.7}
ALL_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}

# One model per family with as many of its switches as can be on.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**ALL_BIASES, "rope_scaling": LLAMA3, "extra_eos_ids": (5, 7), "bos_id": 1, "init_std": 0.01},
    "qwen2": {"qkv_bias": True, "tied_head": True, "sliding_window": 8, "sliding_layers": (1,), "norm_eps": 1e-6},
    "qwen3": {"qk_norm": True, "rope_theta": 1e6, "rope_scaling": {"kind": "linear", "factor": 2.0}, "head_dim": 16},
    "gpt2": {
        **ALL_BIASES, "num_kv_heads": 4, "norm": "layernorm", "position": "learned", "activation": "gelu_tanh",
        "tied_head": True, "dropout": 0.1,
    },
    "mixtral": {"moe": {**MOE, "expert_dim": 48}, "sliding_window": 16},
    "qwen2_moe": {
        "qkv_bias": True,
        "moe": {
            **MOE, "num_shared_experts": 1, "shared_dim": 24, "shared_gate": True, "layer_step": 2,
            "normalise_top_k": False,
        },
    },
    "qwen3_moe": {"qk_norm": True, "moe": {**MOE, "dense_layers": (0,)}},
    "deepseek_v2": {
        **LATENT, "mla": MLA,
        "moe": {**MOE, "num_shared_experts": 2, "first_dense_layers": 1, "groups": 4, "top_groups": 2},
    },
    "deepseek_v3": {
        **LATENT, "mla": {**MLA, "q_lora_rank": 8}, "rope_scaling": YARN,
        "moe": {
            **MOE, "num_shared_experts": 1, "first_dense_layers": 1, "groups": 4, "top_groups": 2, "score": "sigmoid",
            "bias_correction": True, "routed_scale": 2.5,
        },
    },
    "gpt_oss": {
        **ALL_BIASES, "attention_sinks": True, "swiglu_limit": 7.0, "sliding_window": 8, "sliding_layers": (0,),
        "rope_scaling": {**YARN, "truncate": False}, "moe": {**MOE, "expert_dim": 48, "router_bias": True},
    },
}  # fmt: skip


def small(family: str = "llama", **changes: Any) -> ModelConfig:
    return ModelConfig(**{**SMALL, "family": family, **changes})


def of_family(family: str) -> ModelConfig:
    return small(family, **FAMILIES[family])


def renamed(config: ModelConfig, name: str) -> ModelConfig:
    return config.model_copy(update={"name": name})


def shared_config(shared: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((shared / "data" / "configs" / f"{name}.json").read_text())
    return content


# -- counts ----------------------------------------------------------------------------------------


def test_parameter_counts_of_known_models(shared: Path) -> None:
    index = shared_config(shared, "index")
    assert len(index) >= 27
    for name, counts in index.items():
        config = ModelConfig.from_hf(shared_config(shared, name))
        assert config.num_parameters() == counts["params"], name
        assert config.num_active_parameters() == counts["active_params"], name
        layers = sum(config.num_layer_parameters(layer) for layer in range(config.num_layers))
        assert config.num_non_embedding_parameters() == layers + config.dim * (2 if config.norm == "layernorm" else 1)


def test_counts_of_bench_model_by_hand() -> None:
    config = preset("bench-25m")
    matrices = 8 * (4 * 512**2 + 3 * 512 * 1024) + 512 * 8192
    assert config.matmul_parameters() == matrices
    assert config.num_parameters() == matrices + 512 * 8192 + 17 * 512
    assert config.flops_per_token(256) == 6 * matrices + 6 * 8 * 512 * 256
    assert config.flops_per_token(256, convention="full") == 6 * matrices + 12 * 8 * 512 * 256
    assert config.flops_per_token(256, backward=False) == 2 * matrices + 2 * 8 * 512 * 256
    table = 0 if config.tied_head else config.vocab_size * config.dim
    assert config.flops_per_token(256, embedding=True) == 6 * (matrices + table) + 6 * 8 * 512 * 256
    assert config.kv_bytes_per_token() == 2 * 8 * 512 * 2


def test_tying_the_head_changes_parameters_but_not_work() -> None:
    loose, tied = small(), small(tied_head=True)
    assert loose.num_parameters() - tied.num_parameters() == 64 * 32
    assert loose.num_non_embedding_parameters() == tied.num_non_embedding_parameters()
    assert loose.matmul_parameters() == tied.matmul_parameters()
    assert loose.flops_per_token(64) == tied.flops_per_token(64)


def test_flops_of_experts_latent_attention_and_windows() -> None:
    experts = of_family("qwen2_moe")  # layer 0 dense, layer 1 with 2 of 8 experts, a shared one and its gate
    attention = 32 * (32 + 32 + 2 * 16)
    per_expert = 3 * 32 * 16
    work = 2 * attention + 3 * 32 * 48 + 32 * 8 + 2 * per_expert + 3 * 32 * 24 + 32 + 32 * 64
    assert experts.matmul_parameters() == work
    assert experts.num_parameters() - experts.num_active_parameters() == 6 * per_expert

    latent = of_family("deepseek_v3")
    assert latent.flops_per_token(10) - 6 * latent.matmul_parameters() == 6 * 2 * 4 * (12 + 6) * 10 / 2

    windowed = of_family("qwen2")  # layer 1 looks back on 8 tokens
    full = windowed.flops_per_token(64, convention="full") - 6 * windowed.matmul_parameters()
    assert full == 12 * 32 * (64 + 8)
    causal = windowed.flops_per_token(64) - 6 * windowed.matmul_parameters()
    assert causal == 12 * 32 * (64 / 2 + 8 - 8 * 8 / (2 * 64))
    assert windowed.flops_per_token(8) == windowed.model_copy(update={"sliding_window": None}).flops_per_token(8)


def test_kv_bytes() -> None:
    assert preset("llama-3.1-8b").kv_bytes_per_token() == 2 * 32 * 8 * 128 * 2
    assert preset("deepseek-v3").kv_bytes_per_token() == 61 * (512 + 64) * 2
    assert preset("llama-3.1-8b").kv_bytes_per_token(1) == 65536


def test_which_layers_have_experts() -> None:
    layers = small(num_layers=6, moe={**MOE, "first_dense_layers": 1, "layer_step": 2, "dense_layers": [3]})
    assert [layer for layer in range(6) if layers.is_moe_layer(layer)] == [1, 5]
    assert layers.is_moe and not small().is_moe


# -- presets ---------------------------------------------------------------------------------------


def test_presets_equal_the_shared_configs(shared: Path) -> None:
    names = {path.stem for path in (shared / "data" / "configs").glob("*.json")} - {"index"}
    assert names <= set(PRESETS)
    for name in names:
        assert preset(name) == renamed(ModelConfig.from_hf(shared_config(shared, name)), name), name


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_hugging_face(name: str) -> None:
    config = preset(name)
    assert config.name == name
    assert renamed(ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))), name) == config


def test_small_presets_are_small() -> None:
    assert preset("tiny").num_parameters() < 200_000 and not preset("tiny").is_moe
    assert preset("tiny-moe").num_parameters() < 500_000 and preset("tiny-moe").is_moe
    assert 1_000_000 < preset("demo").num_parameters() < 2_000_000
    assert preset("tiny", num_layers=4).num_layers == 4


# -- Hugging Face ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(family: str) -> None:
    config = of_family(family)
    assert renamed(ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))), config.name) == config


def test_transformers_builds_the_same_model() -> None:
    """transformers reads every family's dict, builds a model of our exact size, and what it saves reads back equal."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", reason="transformers is a test dependency: make setup")
    for family in FAMILIES:
        config = of_family(family)
        values = {key: value for key, value in config.to_hf().items() if key != "model_type"}
        theirs = transformers.AutoConfig.for_model(family, **values)
        assert renamed(ModelConfig.from_hf(theirs.to_dict()), config.name) == config, family
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(theirs)
        tensors = [*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("correction_bias"))]
        assert sum(tensor.numel() for tensor in tensors) == config.num_parameters(), family


def test_small_real_models(shared: Path) -> None:
    models = shared / "data" / "models"
    llama = ModelConfig.load(models / "babyllama-tok105")
    assert (llama.name, llama.num_parameters(), llama.tied_head) == ("babyllama-tok105", 936_448, True)
    assert ModelConfig.load(str(models / "babyllama-tok105" / "config.json")) == llama
    assert ModelConfig.load(models / "moe-gsm8k-1.5m").num_parameters() == 1_512_576


def test_defaults_of_the_format() -> None:
    raw = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    raw |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": None, "head_dim": None}
    llama = ModelConfig.from_hf(raw)
    assert (llama.num_kv_heads, llama.head_dim, llama.norm_eps, llama.max_positions) == (4, 8, 1e-6, 2048)
    assert not (llama.qkv_bias or llama.out_bias or llama.tied_head)
    biased = ModelConfig.from_hf({**raw, "attention_bias": True})
    assert biased.qkv_bias and biased.out_bias and not biased.mlp_bias
    qwen2 = ModelConfig.from_hf({**raw, "model_type": "qwen2", "attention_bias": False})
    assert qwen2.qkv_bias and not qwen2.out_bias  # the format has no such switch
    gpt2 = ModelConfig.from_hf({"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4})
    assert (gpt2.ffn_dim, gpt2.max_positions, gpt2.tied_head, gpt2.mlp_bias) == (128, 1024, True, True)
    assert (gpt2.norm, gpt2.position, gpt2.activation) == ("layernorm", "learned", "gelu_tanh")
    several = ModelConfig.from_hf({**raw, "eos_token_id": [3, 4]})
    assert (several.eos_id, several.extra_eos_ids) == (3, (4,))


def test_rope_in_both_spellings() -> None:
    old = of_family("llama").to_hf()
    scaling = old.pop("rope_scaling")
    theta = old.pop("rope_theta")
    new = {**old, "rope_parameters": {**scaling, "rope_theta": theta + 1}}
    older = {**old, "rope_theta": theta + 1, "rope_scaling": {**scaling, "type": scaling["rope_type"]}}
    del older["rope_scaling"]["rope_type"]
    assert ModelConfig.from_hf(new) == ModelConfig.from_hf(older)
    assert ModelConfig.from_hf(new).rope_theta == theta + 1
    plain = {**old, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}
    assert ModelConfig.from_hf(plain).rope_scaling is None
    assert ModelConfig.from_hf(plain).rope_theta == 7.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, r"'lama', did you mean 'llama'.*supported: llama, qwen2, .*kimi_k2"),
        ({"model_type": None}, "no model_type"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers='two' must be a whole number"),
        ({"rope_theta": "big"}, "rope_theta='big'"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not offered"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "'dynamic' is not offered; known: default, linear"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_scaling": None}, "per kind of layer"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}, "needs layer_types"),
        ({"model_type": "mixtral"}, "num_experts"),
    ],
)
def test_foreign_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_hf({**of_family("llama").to_hf(), **changes})


def test_latent_attention_with_biases_is_refused() -> None:
    with pytest.raises(ModelConfigError, match="attention_bias=true is not offered"):
        ModelConfig.from_hf({**of_family("deepseek_v3").to_hf(), "attention_bias": True})


def test_a_format_that_cannot_hold_the_model_is_refused() -> None:
    with pytest.raises(ModelConfigError, match=r"'llama' cannot hold qk_norm=True"):
        small("llama", qk_norm=True).to_hf()
    with pytest.raises(ModelConfigError, match=r"'qwen2' cannot hold qkv_bias=False"):
        small("qwen2").to_hf()


# -- construction and loading ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, r"num_kv_heads=3 must divide num_heads=4; use one of \[1, 2, 4\]"),
        ({"head_dim": 7}, "must be even, not 7"),
        ({"dim": 30, "head_dim": None}, "num_heads=4 does not divide dim=30"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_layers": -1}, "num_layers=-1"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"norm_eps": float("nan")}, "norm_eps=nan"),
        ({"ffn_dim": None}, "'ffn_dim' is missing"),
        ({"num_layer": 2}, "unknown field 'num_layer'; did you mean 'num_layers'"),
        ({"norm": "batchnorm"}, "norm='batchnorm'.*'rmsnorm'"),
        ({"moe": {**MOE, "top_k": 9}}, "top_k=9 must be at most 8"),
        ({"moe": {**MOE, "groups": 3}}, "groups=3 must divide num_experts=8"),
        ({"moe": {**MOE, "groups": 4, "top_groups": 5}}, "top_groups=5"),
        ({"moe": {**MOE, "first_dense_layers": 2}}, "none of the 2 layers"),
        ({"moe": {**MOE, "dense_layers": [5]}}, "below num_layers=2"),
        ({"moe": {**MOE, "shared_gate": True}}, "shared_gate"),
        ({"moe": {**MOE, "experts": 2}}, "MoEConfig: unknown field 'experts'; did you mean 'num_experts'"),
        ({"mla": MLA}, "leave both out"),
        ({"mla": MLA, "head_dim": 12, "num_kv_heads": 4, "qkv_bias": True}, "qkv_bias"),
        ({"rope_scaling": {"kind": "llama3", "factor": 8}}, "needs original_max_positions"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "must be above"),
        ({"rope_scaling": LLAMA3, "position": "learned"}, "position='learned'"),
        ({"sliding_layers": [0]}, "without sliding_window"),
        ({"swiglu_limit": 7.0, "activation": "gelu"}, "activation='swiglu'"),
    ],
)
def test_impossible_shapes_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    fields = {key: value for key, value in {**SMALL, **changes}.items() if value is not None}
    with pytest.raises(ModelConfigError, match=message) as caught:
        ModelConfig(**fields)
    assert "\n" not in str(caught.value)


def test_layer_and_length_out_of_range() -> None:
    with pytest.raises(ModelConfigError, match="layers 0 to 1"):
        small().num_layer_parameters(2)
    with pytest.raises(ModelConfigError, match="seq_len=0"):
        small().flops_per_token(0)


def test_derived_fields_and_value_semantics() -> None:
    derived = ModelConfig(vocab_size=8, dim=32, num_layers=1, num_heads=4, ffn_dim=8)
    given = ModelConfig(vocab_size=8, dim=32, num_layers=1, num_heads=4, ffn_dim=8, num_kv_heads=4, head_dim=8)
    assert derived == given and hash(derived) == hash(given)
    for family in FAMILIES:
        config = of_family(family)
        assert pickle.loads(pickle.dumps(config)) == config
        assert ModelConfig(**json.loads(config.model_dump_json())) == config
    with pytest.raises(ValidationError, match="frozen"):
        derived.dim = 64  # type: ignore[misc]


def test_what_makes_it_another_model_than_the_one_trained() -> None:
    trained = small("mixtral", moe=MOE, rope_scaling={"kind": "linear", "factor": 2.0})
    free = {"name": "x", "dropout": 0.3, "init_std": 0.5, "eos_id": 3, "max_positions": 128}
    assert trained.moe is not None
    free["moe"] = trained.moe.model_copy(update={"aux_coefficient": 0.7})
    assert trained.model_copy(update=free).changes_from(trained) == []
    other = small("mixtral", moe={**MOE, "top_k": 1}, num_kv_heads=1, max_positions=8, norm_eps=0.5)
    changes = other.changes_from(trained)
    assert changes[:4] == [
        "model.num_kv_heads is 1 instead of 2",
        "model.max_positions is 8 instead of 64",
        "model.norm_eps is 0.5 instead of 1e-05",
        "model.moe.top_k is 1 instead of 2",
    ]
    assert {"model.rope_scaling.kind is None instead of linear", "model.rope_scaling.factor is None instead of 2.0"} < {*changes}
    learned = of_family("gpt2")
    longer = learned.model_copy(update={"max_positions": 128})
    assert longer.changes_from(learned) == ["model.max_positions is 128 instead of 64"]


def test_load_from_mapping_preset_and_bad_paths(tmp_path: Path) -> None:
    assert ModelConfig.load("tiny") == preset("tiny")
    assert ModelConfig.load(SMALL) == small()
    changed = ModelConfig.load({"preset": "tiny", "num_layers": 3, "name": "mine"})
    assert (changed.name, changed.num_layers, changed.dim) == ("mine", 3, 64)
    (tmp_path / "config.json").write_text(json.dumps(of_family("qwen3").to_hf()))
    assert ModelConfig.load(tmp_path) == renamed(of_family("qwen3"), tmp_path.name)
    with pytest.raises(ModelConfigError, match=r"did you mean 'llama-3.1-8b'"):
        ModelConfig.load("llama-3.1-8")
    with pytest.raises(ModelConfigError, match=r"no preset 'tinny'; did you mean 'tiny'"):
        ModelConfig.load({"preset": "tinny"})
    with pytest.raises(ModelConfigError, match=r"cannot read .*config\.json"):
        (tmp_path / "empty").mkdir()
        ModelConfig.load(tmp_path / "empty")
    for content in (b"", b"{", b"\xff\xfe\x00", b"[1]"):
        bad = tmp_path / "bad.json"
        bad.write_bytes(content)
        with pytest.raises(ModelConfigError, match=r"bad\.json (is not JSON|holds a JSON list)"):
            ModelConfig.load(bad)


# -- clusters --------------------------------------------------------------------------------------


def test_chips_carry_the_shared_facts(shared: Path) -> None:
    with (shared / "planner" / "hardware.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["name"] for row in rows} == set(CHIPS)
    for row in rows:
        chip = CHIPS[row["name"]]
        for field, column, unit in [
            ("bf16", "bf16_dense_tflops", 1e12),
            ("fp16", "fp16_dense_tflops", 1e12),
            ("fp8", "fp8_dense_tflops", 1e12),
            ("fp32", "fp32_tflops", 1e12),
            ("memory_bandwidth", "mem_tb_s", 1e12),
            ("intra_bandwidth", "intra_domain_gb_s_per_dir_per_gpu", 1e9),
            ("inter_bandwidth", "inter_node_gb_s_per_gpu", 1e9),
            ("domain_size", "scale_up_domain_size", 1),
        ]:
            value = getattr(chip, field)
            if row[column]:
                assert value == pytest.approx(float(row[column]) * unit, rel=1e-12), (chip.name, field)
            else:
                assert value is None, (chip.name, field)
        assert chip.memory_bytes == pytest.approx(float(row["mem_gb"]) * 2**30, rel=0.04)
        assert chip.source


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("h100-80gb", "H100-SXM5-80GB"),
        ("H100", "H100-SXM5-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("a100-80gb", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("b200", "B200-SXM-180GB"),
        ("gb200", "GB200-NVL72"),
        ("gb300_nvl72", "GB300-NVL72"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("tpu v5p", "TPU-v5p"),
    ],
)
def test_find_chip(name: str, chip: str) -> None:
    assert find_chip(name).name == chip


def test_unclear_chips_are_refused() -> None:
    with pytest.raises(ConfigError, match="may be a100-sxm4-40gb or a100-sxm4-80gb"):
        find_chip("a100")
    with pytest.raises(ConfigError, match="no chip 'h1000-80gb'; did you mean 'h100-sxm5-80gb'"):
        find_chip("h1000-80gb")
    for other in ("NVIDIA H100 PCIe", "NVIDIA", ""):
        with pytest.raises(ConfigError, match="no chip"):
            find_chip(other)
    with pytest.raises(ConfigError, match=r"no fp8 peak is known for A100.*bf16, fp16, fp32"):
        find_chip("a100-80gb").peak("fp8")
    assert find_chip("h100").peak("bf16") == 989e12


def test_clusters() -> None:
    cluster = Cluster.parse("h100-80gb:8x8")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.world_size) == (8, 8, 64)
    assert [(level.name, level.size, level.bandwidth) for level in cluster.levels] == [
        ("intra", 8, 450e9),
        ("inter", 64, 50e9),
    ]
    assert all(0 < level.latency < 1e-3 for level in cluster.levels)
    assert Cluster.parse("gb200:2x72").levels[0].size == 72
    assert Cluster.parse("a100-80gb:384x8").world_size == 3072
    assert Cluster.parse("h200:1x1").levels == ()
    assert [level.name for level in Cluster.parse("l40s:4x1").levels] == ["inter"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100-80gb", "not CHIP:NODESxGPUS; write h100-80gb:8x8"),
        ("h100-80gb:8", "not CHIP:NODESxGPUS"),
        ("h100-80gb:0x8", "at least 1"),
        ("h100-80gb:2x16", "fast links of H100-SXM5-80GB join 8"),
        ("tpu-v4:1024x8", "no bandwidth between nodes"),
        ("h10:2x8", "no chip 'h10'"),
    ],
)
def test_bad_clusters_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster.parse(text)
