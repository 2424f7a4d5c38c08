"""The same seed and layout twice, on ranks started anew: every loss, norm and parameter has the same bits in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ranks.runs import make_config, trace_runs, write_documents
from shardwright.train.prepare import prepare_data

MODEL: dict[str, Any] = {
    "vocab_size": 320, "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "max_positions": 64,
    "dropout": 0.1, "tied_head": True,
}  # fmt: skip
LAYOUTS = (
    "tp=2,dp=2,zero=2,microbatches=2,accumulate=reduce,bucket_mb=0.01",
    "dp=2,pp=2,schedule=zb_v,microbatches=4",
    "cp=2,dp=2,zero=3,comm=gloo",
)


def test_a_run_is_repeated_bit_for_bit(tmp_path: Path) -> None:
    write_documents(tmp_path)
    data = prepare_data(make_config(str(tmp_path), MODEL, "dp=1"))
    runs = {text: (make_config(str(tmp_path), MODEL, text, ["optim.name=adamw"]), None) for text in LAYOUTS}
    first, second = trace_runs(data, runs), trace_runs(data, runs)
    for text in LAYOUTS:
        for one, other in zip(first[text], second[text], strict=True):
            assert one.losses == other.losses and one.norms == other.norms, text
            assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items()), text
    assert len({first[text][0].losses[0] for text in LAYOUTS}) > 1, "other sums have other roundings: this can fail"
