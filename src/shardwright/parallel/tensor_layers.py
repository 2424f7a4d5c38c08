"""Tensor parallelism for a module of the user's own: split layers, a vocabulary-parallel loss, and a table of styles.

    parallelize(model, {"embed": "vocab", "layers.*.up": "column", "layers.*.down": "row", "head": "column"}, mesh)
    loss = vocab_parallel_cross_entropy(model(tokens), targets, mesh)
    loss.backward()

Column then row needs nothing between them but what works on each channel alone. Every rank of tp must see the same
input and the same loss; then gradients of parameters that are not split are the same on every rank, and those of split ones
are the rank's own part. A parameter that is held whole and used *between* a column and a row layer gets a partial gradient:
sum it over ``mesh.tp`` yourself, or keep it out of there.

Sizes that do not divide by tp are split as evenly as whole rows allow: the last ranks hold fewer, or none.
Notation: I inputs, O outputs, V vocabulary, N tokens; ``_local`` is the rank's own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.comm.base import Comm
from shardwright.comm.mesh import Mesh
from shardwright.comm.regions import gather_from_region, scatter_to_region
from shardwright.core.suggest import did_you_mean
from shardwright.errors import ConfigError
from shardwright.ops.gradients import first_order
from shardwright.parallel.expert_layer import ExpertParallel
from shardwright.parallel.tensor import Region, column_linear, row_linear, vocab_embedding

IGNORE = -100


def _each(size: int, comm: Comm) -> int:
    """Rows of the ranks that are full."""
    return -(-size // comm.size)


def _own(size: int, comm: Comm) -> slice:
    """The rows of ``size`` that this rank holds."""
    each = _each(size, comm)
    return slice(min(comm.rank * each, size), min((comm.rank + 1) * each, size))


def _of_first_rank(tensor: Tensor, comm: Comm) -> Tensor:
    """A copy of the values that the first rank of the axis has, of any dtype."""
    value = tensor.detach().clone(memory_format=torch.contiguous_format)
    if comm.size > 1 and value.numel():
        comm.broadcast(value.view(-1).view(torch.uint8), name="initial weights")
    return value


def _sliced(full: Tensor, dim: int | None, comm: Comm) -> nn.Parameter:
    """This rank's part along ``dim`` (None: all) of the first rank's values; frozen stays frozen."""
    value = _of_first_rank(full, comm)
    if dim is not None:
        part = _own(value.shape[dim], comm)
        value = value.narrow(dim, part.start, part.stop - part.start).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(value, requires_grad=full.requires_grad)


class TensorParallelLayer(nn.Module):
    """A layer whose parameters are split over ``mesh.tp``; ``split`` maps each of them to (dim, global size)."""

    def __init__(self, mesh: Mesh, name: str) -> None:
        super().__init__()
        self.comm, self.region, self.name = mesh.tp, Region(mesh.tp, sequence=False), name
        self.split: dict[str, tuple[int, int]] = {}

    def full_parameters(self) -> dict[str, Tensor]:
        """The whole of each parameter; every rank of tp must call."""
        found = {}
        for name, parameter in self.named_parameters(recurse=False):
            value = parameter.detach()
            if name in self.split:
                dim, size = self.split[name]
                rows = value.movedim(dim, 0)
                padded = rows.new_zeros((_each(size, self.comm), *rows.shape[1:]))
                padded[: rows.shape[0]] = rows
                value = self.comm.all_gather(padded, name=f"{self.name} {name}")[:size].movedim(0, dim)
            found[name] = value.clone(memory_format=torch.contiguous_format)
        return found


class ColumnParallelLinear(TensorParallelLayer):
    """x (..., I), the same on every rank -> (..., O_local), each rank its own output features.

    ``gather_output`` returns all O on every rank; its gradient, the same on every rank, is cut back to the own features.
    Without it the next layer is one that works on each channel alone, or a `RowParallelLinear`. ``full`` is the layer whose
    values are taken; None makes one as ``nn.Linear`` does. Rank 0's values count, so that one seed gives one layer.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: Mesh,
        bias: bool = True,
        gather_output: bool = False,
        *,
        full: nn.Linear | None = None,
        name: str = "column",
    ) -> None:
        super().__init__(mesh, name)
        full = full or nn.Linear(in_features, out_features, bias)
        self.in_features, self.out_features, self.gather_output = in_features, out_features, gather_output
        self.weight = _sliced(full.weight, 0, mesh.tp)
        self.bias = _sliced(full.bias, 0, mesh.tp) if full.bias is not None else None
        self.split = {"weight": (0, out_features), "bias": (0, out_features)}

    def forward(self, x: Tensor) -> Tensor:
        biases = [] if self.bias is None else [self.bias]
        y = column_linear(_rows(x, self.in_features, self.name), [self.weight], biases, self.region, self.name)
        if self.gather_output:
            y = _gather_features(y, self.out_features, self.comm, f"{self.name} output")
        return y.view(*x.shape[:-1], y.shape[1])


class RowParallelLinear(TensorParallelLayer):
    """x (..., I_local), each rank its own input features -> (..., O), the sum over ranks on every rank.

    With ``input_is_parallel=False`` x is (..., I), the same on every rank, and each takes its own features of it. The bias
    is added once, after the sum. ``full`` as for `ColumnParallelLinear`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        mesh: Mesh,
        bias: bool = True,
        input_is_parallel: bool = True,
        *,
        full: nn.Linear | None = None,
        name: str = "row",
    ) -> None:
        super().__init__(mesh, name)
        full = full or nn.Linear(in_features, out_features, bias)
        self.in_features, self.out_features, self.input_is_parallel = in_features, out_features, input_is_parallel
        self.weight = _sliced(full.weight, 1, mesh.tp)
        self.bias = _sliced(full.bias, None, mesh.tp) if full.bias is not None else None
        self.split = {"weight": (1, in_features)}

    def forward(self, x: Tensor) -> Tensor:
        rows = _rows(x, self.weight.shape[1] if self.input_is_parallel else self.in_features, self.name)
        if not self.input_is_parallel:
            rows = _scatter_features(rows, self.comm, f"{self.name} input")
        y = row_linear(rows, self.weight, self.bias, self.region, self.name)
        return y.view(*x.shape[:-1], self.out_features)


class VocabParallelEmbedding(TensorParallelLayer):
    """tokens (...) int64 -> (..., D): each id is held by one rank, the others add zeros. ``full`` as for the linears."""

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mesh: Mesh,
        *,
        full: nn.Embedding | None = None,
        name: str = "embedding",
    ) -> None:
        super().__init__(mesh, name)
        full = full or nn.Embedding(num_embeddings, embedding_dim)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = _sliced(full.weight, 0, mesh.tp)
        self.first_row = _own(num_embeddings, mesh.tp).start
        self.split = {"weight": (0, num_embeddings)}

    def forward(self, tokens: Tensor) -> Tensor:
        inside = ((tokens >= 0) & (tokens < self.num_embeddings)).all()
        torch._assert_async(inside, f"{self.name}: a token id is not below {self.num_embeddings}")
        y = vocab_embedding(tokens.reshape(-1), self.weight, self.first_row, self.region, self.name)
        return y.view(*tokens.shape, self.embedding_dim)


def _rows(x: Tensor, features: int, name: str) -> Tensor:
    """(..., features) -> (N, features)."""
    if x.shape[-1] != features:
        raise ConfigError(
            f"{name}: the input has {x.shape[-1]} features on this rank, {features} are needed; a row layer with "
            "input_is_parallel takes a column layer's own output, other layers the whole input"
        )
    return x.reshape(x.shape[:-1].numel(), features)


def _gather_features(y: Tensor, size: int, comm: Comm, name: str) -> Tensor:
    """(N, O_local) -> (N, O) on every rank; backward keeps the own features of the gradient."""
    padded = F.pad(y, (0, _each(size, comm) - y.shape[1]))
    return gather_from_region(padded.t(), comm, name)[:size].t().contiguous()


def _scatter_features(x: Tensor, comm: Comm, name: str) -> Tensor:
    """(N, I), the same on every rank -> (N, I_local); backward gathers the gradient."""
    size, part = x.shape[1], _own(x.shape[1], comm)
    padded = F.pad(x, (0, _each(size, comm) * comm.size - size))
    return scatter_to_region(padded.t(), comm, name)[: part.stop - part.start].t().contiguous()


# -- the loss --------------------------------------------------------------------------------------------


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _Statistics:
    """Of split logits (N, V_local): each token's maximum over all ranks, and every rank's share of the vocabulary.

    The widths travel with the maximum, so that an uneven split needs no message of its own.
    """

    def __init__(self, logits: Tensor, comm: Comm) -> None:
        tokens, width = logits.shape
        message = torch.full((tokens + comm.size,), -torch.inf, dtype=_wide(logits), device=logits.device)
        if width:
            message[:tokens] = logits.amax(1)
        message[tokens + comm.rank] = width
        comm.all_reduce(message, "max", name="loss maximum")
        self.peak, widths = message[:tokens], message[tokens:]
        self.first_row, self.vocab_size = widths[: comm.rank].sum().long(), widths.sum()


class _CrossEntropy(torch.autograd.Function):
    """-sum_v q_v log p_v + z_loss log(Z)^2 of each token, with q the smoothed one-hot; gradient (p - q) by hand.

    Three reductions of [N]: the maximum, the sum of exponentials and the logits weighted by q. All ranks get the loss, so
    its gradient is the same on all ranks and each needs its own logits only.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, comm: Comm, smoothing: float, z_loss: float) -> Tensor:
        found = _Statistics(logits, comm)
        valid = targets != IGNORE
        torch._assert_async(
            (~valid | (targets >= 0) & (targets < found.vocab_size)).all(), "a target is neither a token id nor -100"
        )
        local = targets - found.first_row
        mine = (local >= 0) & (local < logits.shape[1])
        index = torch.where(mine, local, 0).unsqueeze(1)
        shifted = logits.to(found.peak.dtype) - found.peak.unsqueeze(1)
        weighted = torch.zeros_like(found.peak)
        if logits.shape[1]:
            weighted += shifted.gather(1, index).squeeze(1) * mine * (1.0 - smoothing)
        if smoothing:
            weighted += shifted.sum(1) * (smoothing / found.vocab_size)
        denominator = shifted.exp_().sum(1)
        comm.all_reduce(denominator, name="loss denominator")
        comm.all_reduce(weighted, name="loss target")
        log_sum_exp = denominator.log() + found.peak
        ctx.save_for_backward(logits, log_sum_exp, index, mine, valid, found.vocab_size)
        ctx.smoothing, ctx.z_loss = smoothing, z_loss
        return (denominator.log() - weighted + z_loss * log_sum_exp.square()) * valid

    @staticmethod
    @first_order
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum_exp, index, mine, valid, vocab_size = ctx.saved_tensors
        gradient = (logits.to(log_sum_exp.dtype) - log_sum_exp.unsqueeze(1)).exp_()
        gradient *= (1.0 + 2.0 * ctx.z_loss * log_sum_exp).unsqueeze(1)
        if ctx.smoothing:
            gradient -= ctx.smoothing / vocab_size
        if logits.shape[1]:
            gradient.scatter_add_(1, index, mine.to(gradient.dtype).unsqueeze(1) * (ctx.smoothing - 1.0))
        gradient *= (d_loss * valid).unsqueeze(1)
        return gradient.to(logits.dtype), None, None, None, None


def vocab_parallel_cross_entropy(
    logits_local: Tensor,
    targets: Tensor,
    mesh: Mesh,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    vocab_size: int | None = None,
) -> Tensor:
    """``F.cross_entropy`` of logits whose vocabulary is split over ``mesh.tp``; the same on every rank.

    logits_local (..., V_local) as a `ColumnParallelLinear` without ``gather_output`` gives them, targets (...) global ids,
    -100 where none counts. ``z_loss`` adds z_loss * log(Z)^2. ``mean`` is over valid targets, and 0 where there is none; the
    result is in fp32 (fp64 for fp64 logits). Nothing of shape [N, V] is made or sent. ``vocab_size`` is for checking only:
    logits that were already gathered are then refused, which would count the vocabulary tp times.
    """
    comm = mesh.tp
    _check_loss(logits_local, targets, comm, label_smoothing, reduction, vocab_size)
    logits = logits_local.reshape(targets.numel(), logits_local.shape[-1])
    flat = targets.reshape(-1)
    losses: Tensor = _CrossEntropy.apply(logits, flat, comm, label_smoothing, z_loss)
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (flat != IGNORE).sum().clamp_min(1)


def _check_loss(
    logits: Tensor, targets: Tensor, comm: Comm, smoothing: float, reduction: str, vocab_size: int | None
) -> None:
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(f"logits {tuple(logits.shape)} need targets {tuple(logits.shape[:-1])}, not {tuple(targets.shape)}")
    if not 0.0 <= smoothing < 1.0:
        raise ConfigError(f"label_smoothing={smoothing} must be at least 0 and below 1")
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction={reduction!r} is not known; use 'mean', 'sum' or 'none'")
    if vocab_size is not None:
        part = _own(vocab_size, comm)
        if logits.shape[-1] != part.stop - part.start:
            raise ConfigError(
                f"these logits have {logits.shape[-1]} columns, but of a vocabulary of {vocab_size} rank {comm.rank} of "
                f"tp={comm.size} holds {part.stop - part.start}; give the split logits, not gathered ones"
            )


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, comm: Comm) -> Tensor:
        peak = _Statistics(logits, comm).peak
        shifted = logits.to(peak.dtype) - peak.unsqueeze(1)
        denominator = comm.all_reduce(shifted.exp().sum(1), name="loss denominator")
        log_p = shifted - denominator.log().unsqueeze(1)
        ctx.save_for_backward(log_p)
        ctx.comm, ctx.dtype = comm, logits.dtype
        return log_p

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (log_p,) = ctx.saved_tensors
        total = ctx.comm.all_reduce(dy.sum(1), name="log-softmax gradient")
        return (dy - log_p.exp() * total.unsqueeze(1)).to(ctx.dtype), None


def vocab_parallel_log_softmax(logits_local: Tensor, mesh: Mesh) -> Tensor:
    """log-softmax over the whole vocabulary of split logits (..., V_local) -> (..., V_local), in fp32 (fp64 for fp64).

    For any further use (entropy, KL): its gradient is right for each, at one reduction of [N]. What the ranks compute from
    their columns is partial: sum it with ``reduce_from_region(value, mesh.tp, name)``.
    """
    flat = logits_local.reshape(logits_local.shape[:-1].numel(), logits_local.shape[-1])
    log_p: Tensor = _LogSoftmax.apply(flat, mesh.tp)
    return log_p.view(logits_local.shape)


# -- a table of styles -----------------------------------------------------------------------------------


def _column(full: nn.Linear, mesh: Mesh, name: str, gather: bool) -> TensorParallelLayer:
    return ColumnParallelLinear(
        full.in_features, full.out_features, mesh, full.bias is not None, gather, full=full, name=name
    )


def _row(full: nn.Linear, mesh: Mesh, name: str) -> TensorParallelLayer:
    return RowParallelLinear(full.in_features, full.out_features, mesh, full.bias is not None, full=full, name=name)


def _vocab(full: nn.Embedding, mesh: Mesh, name: str) -> TensorParallelLayer:
    asked = {"padding_idx": full.padding_idx, "max_norm": full.max_norm}
    asked |= {"scale_grad_by_freq": full.scale_grad_by_freq or None, "sparse": full.sparse or None}
    for option, value in asked.items():
        if value is not None:
            raise ConfigError(f"{name}: {option}={value} is not offered by a split embedding; make it without {option}")
    return VocabParallelEmbedding(full.num_embeddings, full.embedding_dim, mesh, full=full, name=name)


_STYLES: Mapping[str, tuple[type[nn.Module], Callable[[Any, Mesh, str], TensorParallelLayer]]] = {
    "column": (nn.Linear, lambda full, mesh, name: _column(full, mesh, name, False)),
    "column_gather": (nn.Linear, lambda full, mesh, name: _column(full, mesh, name, True)),
    "row": (nn.Linear, _row),
    "vocab": (nn.Embedding, _vocab),
}


def parallelize(module: nn.Module, table: Mapping[str, str], mesh: Mesh) -> nn.Module:
    """Split layers of ``module`` in place, as ``table`` says: {name pattern: style}; returns it.

    Patterns are those of file names (``layers.*.up``), matched against the names of submodules. Styles: ``column`` and
    ``row`` split an ``nn.Linear`` by outputs or inputs, ``column_gather`` returns all outputs on every rank, ``vocab`` splits an
    ``nn.Embedding`` by rows. Values are rank 0's, of what is not split too. A weight that two layers share stays shared.
    Make the optimizer afterwards.

    Raises `ConfigError` for a pattern that matches nothing, two styles for one layer, a style that does not fit the
    layer, and a shared weight that only some of its layers split, or split in another way.
    """
    chosen = _chosen_styles(module, table)
    local: dict[int, _Shared] = {}
    for name, style in chosen.items():
        full = module.get_submodule(name)
        layer = _STYLES[style][1](full, mesh, name)
        for key, parameter in full.named_parameters(recurse=False):
            dim = layer.split.get(key, (None, 0))[0]
            first = local.setdefault(id(parameter), _Shared(name, dim, parameter, getattr(layer, key)))
            if first.dim != dim:
                raise ConfigError(f"{first.layer} and {name} share a {key}, so their styles must split it the same way")
            setattr(layer, key, first.part)
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, layer.train(full.training))
    parts = {id(shared.part) for shared in local.values()}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if id(tensor) in local:
            other = local[id(tensor)].layer
            raise ConfigError(f"{name} is shared with {other}, which is split; give its layer the fitting style")
        if id(tensor) not in parts:
            tensor.data.copy_(_of_first_rank(tensor, mesh.tp))
    return module


@dataclass
class _Shared:
    """A parameter of the whole module and what became of it, for layers that share it."""

    layer: str
    dim: int | None
    full: nn.Parameter
    part: nn.Parameter


def _chosen_styles(module: nn.Module, table: Mapping[str, str]) -> dict[str, str]:
    """Name of each layer to split -> its style, in the order of the module."""
    layers = {name: layer for name, layer in module.named_modules() if name}
    found: dict[str, tuple[str, str]] = {}
    for pattern, style in table.items():
        if style not in _STYLES:
            raise ConfigError(f"style {style!r} of {pattern!r} is not known; {did_you_mean(style, _STYLES)}")
        matched = [name for name in layers if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(f"pattern {pattern!r} matches no layer; {did_you_mean(pattern, layers)}")
        for name in matched:
            kind = _STYLES[style][0]
            if type(layers[name]) is not kind:
                made = type(layers[name]).__name__
                raise ConfigError(f"style {style!r} needs a plain {kind.__name__}, but {name} is a {made}")
            if name in found and found[name][1] != style:
                raise ConfigError(f"{name} is matched by {found[name][0]!r} and {pattern!r}, which give it two styles")
            found[name] = (pattern, style)
    return {name: found[name][1] for name in layers if name in found}


def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The state dict of the module as it was before it was split, with the experts of all ranks of an `ExpertParallel`; every
    rank of tp and ep must call, and all get it."""
    state: dict[str, Tensor] = dict(module.state_dict())
    for path, layer in module.named_modules():
        if isinstance(layer, TensorParallelLayer | ExpertParallel):
            state |= {f"{path}.{key}" if path else key: value for key, value in layer.full_parameters().items()}
    return state
