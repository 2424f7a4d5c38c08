"""What a training step saves for backward on a GPT block with materialised scores, against the formulas of Korthikanti et al.
2022 (section 4, table 2): bytes per layer and token over the hidden size, 2-byte values and 1-byte dropout masks.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from ranks.kit import run_ranks
from shardwright.comm.mesh import Mesh
from shardwright.core.run_config import RunConfig
from shardwright.launch import RankEnv
from shardwright.schedule.action import Action, Kind
from shardwright.train.data import MicroBatch
from shardwright.train.step import Trainer

TP, HEADS, HIDDEN, SEQ = 4, 16, 128, 128
SCORES = 5 * HEADS * SEQ / HIDDEN  # 5 a s / h with a s / h = 16
FORMULAS = {
    "sp=off": 10 + 24 / TP + SCORES / TP,
    "sp=on": (34 + SCORES) / TP,
    "sp=off,recompute=selective": 10 + 24 / TP,
    "sp=on,recompute=selective": 34 / TP,
}


class Saved:
    """Bytes of the distinct storages that autograd keeps, parameters left out."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._known = {_storage(parameter) for parameter in parameters}
        self._holders: Counter[int] = Counter()
        self.now = 0

    def pack(self, tensor: Tensor) -> _Holder | Tensor:
        return tensor if _storage(tensor) in self._known else _Holder(tensor, self)

    def add(self, tensor: Tensor, holders: int) -> None:
        key = _storage(tensor)
        before = self._holders[key]
        self._holders[key] += holders
        if not before or not self._holders[key]:
            self.now += holders * tensor.untyped_storage().nbytes()


class _Holder:
    def __init__(self, tensor: Tensor, saved: Saved) -> None:
        self.tensor, self._saved = tensor, saved
        saved.add(tensor, 1)

    def __del__(self) -> None:
        self._saved.add(self.tensor, -1)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _unpack(kept: _Holder | Tensor) -> Tensor:
    return kept.tensor if isinstance(kept, _Holder) else kept


def config_of(layout: str, num_layers: int) -> RunConfig:
    model = {
        "vocab_size": 320, "dim": HIDDEN, "num_layers": num_layers, "num_heads": HEADS, "ffn_dim": 4 * HIDDEN,
        "max_positions": SEQ, "family": "gpt2", "norm": "layernorm", "activation": "gelu_tanh", "position": "learned",
        "tied_head": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "dropout": 0.1,
    }  # fmt: skip
    data = {"sources": "synthetic:sentences", "seq_len": SEQ}
    table = {"model": model, "data": data, "train": {"attention": "scores"}}
    return RunConfig.of(table, layout=f"tp={TP},precision=bf16,{layout}")


def saved_bytes(env: RankEnv) -> dict[tuple[str, int], tuple[int, int]]:
    """For each layout and depth: bytes saved when backward begins, and when the step has ended."""
    found = {}
    for layout in FORMULAS:
        for num_layers in (1, 3):
            config = config_of(layout, num_layers)
            trainer = Trainer(config, Mesh.distributed(config.layout, env.rank))
            saved, at_backward = Saved([p.detach() for p in trainer.parameters.values()]), [0]

            def on_action(action: Action, saved: Saved = saved, at_backward: list[int] = at_backward) -> None:
                if action.kind is Kind.BW:
                    at_backward[0] = saved.now

            trainer.executor.on_action = on_action
            index = torch.arange(SEQ)
            batch = MicroBatch(index, index, index, index, (SEQ,), SEQ, (0,))
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, _unpack):
                trainer.step([batch], 0)
            found[layout, num_layers] = at_backward[0], saved.now
    return found


@pytest.fixture(scope="module")
def measured() -> list[dict[tuple[str, int], tuple[int, int]]]:
    return run_ranks(saved_bytes, TP, time_limit=100)


@pytest.mark.parametrize("layout", FORMULAS)
def test_a_layer_saves_what_the_published_formula_says(
    layout: str, measured: list[dict[tuple[str, int], tuple[int, int]]]
) -> None:
    for rank in measured:
        layer = (rank[layout, 3][0] - rank[layout, 1][0]) / 2
        assert layer / (SEQ * HIDDEN) == pytest.approx(FORMULAS[layout], rel=0.03)
        assert rank[layout, 3][1] == 0


def test_sequence_parallelism_and_selective_recomputation_save_four_times_less_than_neither(
    measured: list[dict[tuple[str, int], tuple[int, int]]],
) -> None:
    for rank in measured:
        neither, both = (
            rank[layout, 3][0] - rank[layout, 1][0] for layout in ("sp=off", "sp=on,recompute=selective")
        )
        assert neither >= 4 * both
