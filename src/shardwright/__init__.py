"""shardwright: plan, train, verify and serve transformers across every axis of parallelism.

Importing the package is cheap: names that need torch are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.comm.mesh import Mesh
    from shardwright.core.layout import Layout
    from shardwright.core.ledger import Ledger
    from shardwright.core.model_config import ModelConfig
    from shardwright.core.run_config import RunConfig
    from shardwright.errors import ShardwrightError
    from shardwright.model.transformer import Transformer
    from shardwright.parallel.context import ring_attention, ring_tokens
    from shardwright.parallel.expert_layer import ExpertParallel
    from shardwright.parallel.pipeline_modules import Schedule, Stage
    from shardwright.parallel.tensor_layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        full_state_dict,
        parallelize,
        vocab_parallel_cross_entropy,
        vocab_parallel_log_softmax,
    )
    from shardwright.parallel.wrap import DataParallel

__version__ = "0.1.0"

_HOMES = {
    "ColumnParallelLinear": "shardwright.parallel.tensor_layers",
    "DataParallel": "shardwright.parallel.wrap",
    "ExpertParallel": "shardwright.parallel.expert_layer",
    "Layout": "shardwright.core.layout",
    "Ledger": "shardwright.core.ledger",
    "Mesh": "shardwright.comm.mesh",
    "ModelConfig": "shardwright.core.model_config",
    "RowParallelLinear": "shardwright.parallel.tensor_layers",
    "RunConfig": "shardwright.core.run_config",
    "Schedule": "shardwright.parallel.pipeline_modules",
    "ShardwrightError": "shardwright.errors",
    "Stage": "shardwright.parallel.pipeline_modules",
    "Transformer": "shardwright.model.transformer",
    "VocabParallelEmbedding": "shardwright.parallel.tensor_layers",
    "full_state_dict": "shardwright.parallel.tensor_layers",
    "parallelize": "shardwright.parallel.tensor_layers",
    "ring_attention": "shardwright.parallel.context",
    "ring_tokens": "shardwright.parallel.context",
    "vocab_parallel_cross_entropy": "shardwright.parallel.tensor_layers",
    "vocab_parallel_log_softmax": "shardwright.parallel.tensor_layers",
}

__all__ = [
    "ColumnParallelLinear",
    "DataParallel",
    "ExpertParallel",
    "Layout",
    "Ledger",
    "Mesh",
    "ModelConfig",
    "RowParallelLinear",
    "RunConfig",
    "Schedule",
    "ShardwrightError",
    "Stage",
    "Transformer",
    "VocabParallelEmbedding",
    "__version__",
    "full_state_dict",
    "parallelize",
    "ring_attention",
    "ring_tokens",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_softmax",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'shardwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
