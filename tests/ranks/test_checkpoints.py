"""Checkpoints between layouts: every rank writes its part, any layout reads it, training goes on the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ranks.kit import run_ranks
from ranks.runs import make_config, write_documents
from shardwright.checkpoint.hf import load_hf
from shardwright.core.run_config import RunConfig
from shardwright.train.prepare import PreparedData, prepare_data
from shardwright.verify.reshard import FirstRun, ReshardCase, first_runs, problems, random_layout, second_runs

MODEL = {
    "vocab_size": 320, "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
    "tied_head": True, "dropout": 0.1,
}  # fmt: skip
GPT2 = MODEL | {
    "family": "gpt2", "num_kv_heads": 4, "norm": "layernorm", "activation": "gelu_tanh", "position": "learned",
    "qkv_bias": True, "out_bias": True, "mlp_bias": True,
}  # fmt: skip
EXPERTS = MODEL | {
    "family": "deepseek_v3", "tied_head": False, "dropout": 0.0, "num_kv_heads": 4, "head_dim": 16,
    "mla": {"q_lora_rank": 12, "kv_lora_rank": 8, "nope_head_dim": 8, "rope_head_dim": 8, "v_head_dim": 8},
    "moe": {
        "num_experts": 4, "top_k": 2, "expert_dim": 24, "first_dense_layers": 1, "score": "sigmoid", "bias_correction": True,
        "num_shared_experts": 1,
    },
}  # fmt: skip
"""Experts that the file holds one by one, interleaved rotated halves, a bias that stays fp32."""
ADAM = ["optim.name=adamw", "optim.lr=0.01", "train.shard_gb=4e-5"]
"""Files of 40 kB, so that there are several."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreparedData]:
    folder = tmp_path_factory.mktemp("reshard")
    write_documents(folder)
    return folder, prepare_data(make_config(str(folder), MODEL, "dp=1", ADAM))


PAIRS = {
    "dp and zero 3 to tp and pp": (
        MODEL,
        "dp=4,zero=3,micro_batch=2",
        "dp=1,tp=2,pp=2,schedule=zb_v,microbatches=4,micro_batch=2",
    ),
    "everything to one rank": (MODEL, "dp=2,pp=2,zero=2,schedule=interleaved,virtual=2,microbatches=4", "micro_batch=8"),
    "one rank to hybrid sharding": (MODEL, "microbatches=8", "dp=4,zero=1,dp_replicate=2,micro_batch=2"),
    "joined and transposed weights": (GPT2, "dp=2,tp=2,zero=3,micro_batch=4", "dp=2,pp=2,micro_batch=4"),
    "stacked experts and turned rows": (EXPERTS, "dp=2,ep=2,zero=1,micro_batch=4", "pp=2,microbatches=2,micro_batch=4"),
    "context parallel to shards": (MODEL, "cp=2,micro_batch=8", "dp=2,zero=3,micro_batch=4"),
    "offloaded state": (
        MODEL,
        "dp=2,zero=3,offload=params,offload_fraction=0.4,micro_batch=4",
        "dp=2,zero=1,offload=optimizer,micro_batch=4",
    ),
    "replicated KV heads": (
        MODEL | {"num_kv_heads": 1},
        "tp=2,micro_batch=8",
        "dp=2,zero=1,zero1_reduce=allreduce,microbatches=4",
    ),
}


def run_config(folder: Path, name: str, model: dict[str, object], layout: str, *sets: str) -> RunConfig:
    return make_config(str(folder), model, layout, [*ADAM, f"train.run_dir={folder}/{name}", *sets])


@pytest.fixture(scope="module")
def results(data: tuple[Path, PreparedData]) -> dict[str, tuple[ReshardCase, list[FirstRun], list[float]]]:
    """All pairs, with one launch for each number of ranks."""
    folder, prepared = data
    rng = random.Random(5)
    cases = {}
    for label, (model, first, second) in PAIRS.items():
        frozen = ["train.freeze=['blocks.1.attention.q']"] if "joined" in label or "hybrid" in label else []
        configs = [
            run_config(folder, f"{label} {turn}".replace(" ", "-"), model, layout, *frozen)
            for turn, layout in enumerate((first, second))
        ]
        cases[label] = ReshardCase(*configs, go_on=2)
    plain = run_config(folder, "random", MODEL, "dp=1")
    for index in range(2):
        layouts = [random_layout(rng, plain, world, 8) for world in rng.sample((1, 2, 4), 2)]
        configs = [run_config(folder, f"random-{index}-{turn}", MODEL, str(lay)) for turn, lay in enumerate(layouts)]
        cases[f"random {index}"] = ReshardCase(*configs, go_on=2)
    firsts = launch_all(first_runs, prepared, {label: (case, case.first) for label, case in cases.items()})
    seconds = launch_all(second_runs, prepared, {label: (case, case.second) for label, case in cases.items()})
    return {label: (case, firsts[label], seconds[label][0]) for label, case in cases.items()}


def launch_all(function: object, prepared: PreparedData, cases: dict[str, tuple[ReshardCase, RunConfig]]) -> dict:
    found = {}
    for world in sorted({config.layout.world_size for _, config in cases.values()}):
        labels = [label for label, (_, config) in cases.items() if config.layout.world_size == world]
        ranks = run_ranks(function, world, prepared, [cases[label][0] for label in labels], time_limit=500.0)
        found |= {label: list(each) for label, each in zip(labels, zip(*ranks, strict=True), strict=True)}
    return found


LABELS = [*PAIRS, *(f"random {index}" for index in range(2))]


@pytest.mark.parametrize("label", LABELS)
def test_ck_05_the_same_bits_and_losses_at_another_layout(
    label: str, results: dict[str, tuple[ReshardCase, list[FirstRun], list[float]]]
) -> None:
    case, first, second = results[label]
    assert problems(case, first, second) == [], str(case)


def test_random_layouts_use_every_axis_and_switch_that_leaves_training_as_it_is(tmp_path: Path) -> None:
    """What the pairs of the proof are drawn from; the same for a dense model, but for experts."""
    rng = random.Random(1)
    for model in (EXPERTS, MODEL):
        config = run_config(tmp_path, "drawn", model, "dp=1")
        layouts = [random_layout(rng, config, 8, 8) for _ in range(60)]
        assert {layout.offload for layout in layouts} == {"none", "optimizer", "params"}
        assert {layout.cp_kind for layout in layouts if layout.cp > 1} == {"ring", "allgather", "ulysses"}
        assert {layout.ep for layout in layouts} == ({1, 2, 4} if model is EXPERTS else {1})
        assert {(layout.moe, layout.delayed_update) for layout in layouts} == {("dropless", False)}


def test_a_checkpoint_is_a_model_folder_of_several_files(
    results: dict[str, tuple[ReshardCase, list[FirstRun], list[float]]],
) -> None:
    for label in ("everything to one rank", "joined and transposed weights"):
        case, _, _ = results[label]
        assert len(list(case.saved.glob("model-*-of-*.safetensors"))) > 1
        config, weights = load_hf(case.saved)
        assert config.family == case.first.model.family
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(case.saved).eval()
        name = "model.embed_tokens.weight" if config.family == "llama" else "transformer.wte.weight"
        assert torch.equal(theirs.state_dict()[name], weights["embedding.token.weight"])


def test_frozen_parameters_have_no_state(
    results: dict[str, tuple[ReshardCase, list[FirstRun], list[float]]],
) -> None:
    _, first, _ = results["joined and transposed weights"]
    assert "blocks.1.attention.q.weight" not in first[0].optimizer["exp_avg"]
    assert "blocks.1.attention.q.weight" in first[0].parameters
