"""One decoder for every use: its units (embedding, blocks, head) over packed tokens.

Notation: T tokens, D model dim, V vocabulary. A unit maps (x, context) to the next x; the executor runs units one by
one, generation and evaluation call the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwright.comm.mesh import Mesh
from shardwright.core.model_config import ModelConfig
from shardwright.core.run_config import RouterConfig
from shardwright.core.specs import TIED, unit_names
from shardwright.model.attention import Attention
from shardwright.model.context import Context
from shardwright.model.init import ParameterTable, initialise
from shardwright.model.layers import Norm
from shardwright.model.loss import head_loss
from shardwright.model.mla import LatentAttention
from shardwright.model.mlp import MLP
from shardwright.model.moe import MoE
from shardwright.model.router import Routed
from shardwright.ops.attention import Attend
from shardwright.ops.capacity import Limit
from shardwright.ops.linear import embedding
from shardwright.ops.residual import add_into
from shardwright.ops.rope import rotation
from shardwright.ops.routing import Exchange, LocalExchange
from shardwright.parallel.expert import make_exchange, make_sums
from shardwright.parallel.tensor import Region, column_linear, vocab_embedding


class Lookup(nn.Module):
    """A table (rows, D) read by index."""

    def __init__(self, name: str, table: ParameterTable) -> None:
        super().__init__()
        self.weight = table.make(f"{name}.weight")


class Embedding(nn.Module):
    """tokens (T,) -> (T, D), or its own T/tp rows, plus learned positions where the model has them."""

    def __init__(self, config: ModelConfig, table: ParameterTable) -> None:
        super().__init__()
        self.token = Lookup("embedding.token", table)
        self.position = Lookup("embedding.position", table) if config.position == "learned" else None
        self.first_row = table.first_row("embedding.token.weight")

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        x = vocab_embedding(tokens, self.token.weight, self.first_row, context.region, "embedding")
        if self.position is not None:
            x = x + embedding(context.region.own_tokens(context.positions), self.position.weight)
        return context.drop(x, layer=-1, site=0)


class Block(nn.Module):
    """x (T, D) -> (T, D): attention and MLP or experts, each normed before and added to the residual."""

    def __init__(self, config: ModelConfig, layer: int, table: ParameterTable) -> None:
        super().__init__()
        self.layer = layer
        self.attention_norm = Norm(f"blocks.{layer}.attention_norm", config, table)
        latent = config.mla is not None
        self.attention = LatentAttention(config, layer, table) if latent else Attention(config, layer, table)
        self.mlp_norm = Norm(f"blocks.{layer}.mlp_norm", config, table)
        self.mlp = None if config.is_moe_layer(layer) else MLP(config, layer, table)
        self.moe = MoE(config, layer, table) if config.is_moe_layer(layer) else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        normed, x = self.attention_norm.beside(x)
        x = add_into(x, context.drop(self.attention(normed, context), self.layer, site=1))
        normed, x = self.mlp_norm.beside(x)
        if self.mlp is not None:
            return add_into(x, context.drop(self.mlp(normed, context), self.layer, site=2))
        assert self.moe is not None
        return x + context.drop(self.moe(normed, context), self.layer, site=2)


class Head(nn.Module):
    """x (T, D) -> the summed loss when the context has targets, else logits (T, V), the rank's own columns with tp."""

    def __init__(self, config: ModelConfig, table: ParameterTable, tied: nn.Parameter | None) -> None:
        super().__init__()
        self.norm = Norm("head.norm", config, table)
        self.weight = table.make("head.weight") if tied is None else tied
        self.first_row = table.first_row("embedding.token.weight" if tied is not None else "head.weight")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = self.norm(x)
        if context.targets is None:
            return column_linear(x, [self.weight], [], context.region, "head")
        return head_loss(x, self.weight, context.targets, context.region, self.first_row, context.loss_chunk)


class Transformer(nn.Module):
    """The decoder of ``config`` as rank ``mesh.rank`` holds it; parameters are named as in the spec table.

    ``units``: names of the units that this pipeline rank holds, all by default; the head of a tied model then holds a
    copy of the embedding's table. ``device`` of meta makes shapes only (dry run). Values are filled by :meth:`initialise`
    or a checkpoint. ``hollow``: parameters have shapes and no memory; who gives them theirs fills it (:meth:`first_value`).
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        units: Sequence[str] | None = None,
        *,
        hollow: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.mesh, self.dtype = config, mesh, dtype
        names = unit_names(config)
        held = names if units is None else tuple(name for name in names if name in units)
        self.region = Region(mesh.tp, mesh.layout.sequence_parallel, mesh.layout.tp_overlap)
        self.exchange: Exchange = make_exchange(mesh, config.moe.num_experts) if config.moe is not None else LocalExchange()
        self.sums = make_sums(mesh)
        table = ParameterTable(config, mesh, dtype, torch.device(device), hollow=hollow)
        self.specs = table.specs
        self._hollow = hollow
        self._units: dict[str, nn.Module] = {}
        self.embedding = Embedding(config, table) if "embedding" in held else None
        table_only = self.embedding is None and config.tied_head and "head" in held
        self.tied = Lookup(TIED.removesuffix(".weight"), table) if table_only else None
        self.blocks = nn.ModuleDict()
        for layer in range(config.num_layers):
            if f"blocks.{layer}" in held:
                self.blocks[str(layer)] = Block(config, layer, table)
        tied = (self.tied or self._token_table()).weight if config.tied_head and "head" in held else None
        self.head = Head(config, table, tied) if "head" in held else None
        modules = {"embedding": self.embedding, "head": self.head}
        for name in held:
            unit = modules[name] if name in modules else self.blocks[name.removeprefix("blocks.")]
            assert unit is not None
            self._units[name] = unit

    def _token_table(self) -> Lookup:
        assert self.embedding is not None
        return self.embedding.token

    def spec_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by their names in the spec table, in order of use."""
        own = "tied.weight"
        found = {(TIED if name == own else name): parameter for name, parameter in self.named_parameters()}
        return {name: found[name] for name in self.specs if name in found}

    def initialise(self, seed: int) -> Transformer:
        """Fill every parameter that has memory, from the seed and its name; returns self."""
        named = self.spec_parameters().items()
        filled = [(name, value) for name, value in named if not self._hollow or self.specs[name].buffer]
        initialise(filled, self.specs, self.mesh, seed)
        return self

    def first_value(self, name: str, view: Tensor, seed: int) -> None:
        """Fill ``view`` (this rank's shape) with what :meth:`initialise` gives the parameter ``name``."""
        initialise([(name, view)], self.specs, self.mesh, seed)

    def units(self) -> dict[str, nn.Module]:
        """The held units by name, in order of use."""
        return dict(self._units)

    def context(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        targets: Tensor | None = None,
        token_index: Tensor | None = None,
        seed: int = 0,
        step: int = 0,
        recompute: str = "none",
        loss_chunk: int = 0,
        router: RouterConfig | None = None,
        sequence: Tensor | None = None,
        place: Tensor | None = None,
        num_sequences: int = 1,
        padded: bool = False,
        limit: Limit | None = None,
        routed: list[Routed] | None = None,
    ) -> Context:
        """The context of one call: adds the rotation of ``positions`` and the model's dropout rate."""
        turned = rotation(self.config, positions, self.dtype) if self.config.position == "rope" else None
        rate = self.config.dropout
        return Context(
            tokens, positions, attend, turned, self.region, targets, token_index, rate, seed, step, recompute, loss_chunk,
            self.exchange, self.sums, router or RouterConfig(), sequence, place, num_sequences, padded, limit, routed,
        )  # fmt: skip

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, targets: Tensor | None = None) -> Tensor:
        """tokens and positions (T,) -> logits (T, V), or the summed loss over valid ``targets`` (T,). No dropout."""
        return self.run(self.context(tokens, positions, attend, targets=targets))

    def run(self, context: Context) -> Tensor:
        """All units on one context."""
        x = context.tokens
        for unit in self.units().values():
            x = unit(x, context)
        return x

    def compile_blocks(self) -> None:
        """``torch.compile`` each block (the same code for all layers); gradients then go through autograd."""
        for block in self.blocks.values():
            block.compile(dynamic=False)


def freeze(model: Transformer, patterns: Sequence[str]) -> None:
    """Switch off gradients of parameters whose name starts with one of ``patterns``."""
    for name, parameter in model.spec_parameters().items():
        if name.startswith(tuple(patterns)):
            parameter.requires_grad_(False)
