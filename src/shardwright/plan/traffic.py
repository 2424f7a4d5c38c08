"""Every message of one step on one rank, from formulas: verb, axis, tensor, bytes, how often, on which link, how long.

Per layer and micro-batch, T tokens on a rank, c = cp, t = tp (size in bytes of the full tensor):

====  =========================  ==========================================================================
axis  forward                    backward
====  =========================  ==========================================================================
tp    2 all-reduces T D          2 all-reduces T D
tp+   2 (gather + scatter) T D   the same, and 2 gathers of inputs that were not kept
cp    ring: (c-1) x 2 K H T      (c-1) x 2 K H T and c x 2 K H T of fp32 gradients
ep    2 all-to-alls k D T/t      2 all-to-alls k D T/t
pp    T D (/t with tp+) sent     the same
====  =========================  ==========================================================================

Per step, P parameters of a rank: gradients 2(N-1)/N P, by ZeRO stage and micro-batches as in the table of core.layout's
keys: ``reshard=always`` gathers 2m times, ``after_backward`` m times, once while the reduction is deferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.core.axes import RankGrid
from shardwright.core.dispatch import touched_share
from shardwright.core.layout import Layout
from shardwright.core.ledger import Ledger, ring_bytes
from shardwright.core.model_config import ModelConfig
from shardwright.plan.compute import ACTIVATION_BYTES, LayerKind, Shape, UnitCost
from shardwright.plan.memory import GRADIENT_BYTES, PARAMETER_BYTES
from shardwright.plan.network import Network, Span
from shardwright.plan.stack import Stack
from shardwright.plan.stages import Parameters

ACCUMULATION_BYTES = 4
"""Of a key or value gradient that travels around a ring."""


@dataclass(frozen=True)
class Message:
    """One kind of message. ``bytes`` one rank sends each time; ``exposed`` seconds of each that a rank waits."""

    phase: str
    verb: str
    axis: str
    tensor: str
    bytes: int
    seconds: float
    exposed: float
    link: str
    count: int = 1

    def times(self, count: int) -> Message:
        return Message(
            self.phase, self.verb, self.axis, self.tensor, self.bytes, self.seconds, self.exposed, self.link,
            self.count * count,
        )  # fmt: skip

    def hidden(self, share: float) -> Message:
        """With ``share`` of its time behind other work."""
        return replace(self, exposed=self.seconds * (1 - share))


def add_messages(ledger: Ledger, messages: list[Message]) -> None:
    """Sum messages into a ledger's entries."""
    for m in messages:
        ledger.add(
            m.phase, m.verb, m.axis, m.tensor, m.bytes * m.count, count=m.count,
            seconds=m.seconds * m.count, exposed_seconds=m.exposed * m.count, link=m.link,
        )  # fmt: skip


class Traffic:
    """Messages of one layout on one network."""

    def __init__(self, model: ModelConfig, layout: Layout, shape: Shape, network: Network, stack: Stack) -> None:
        self.model, self.layout, self.shape, self.network, self.stack = model, layout, shape, network, stack
        self.grid = layout.grid
        self.size = ACTIVATION_BYTES.get(layout.precision, 2)
        self._spans: dict[str, Span] = {}

    def _span(self, axis: str) -> Span:
        if axis not in self._spans:
            self._spans[axis] = self.network.span(self.grid, axis)
        return self._spans[axis]

    def _collective(self, phase: str, verb: str, axis: str, tensor: str, elements: float, size: int) -> Message:
        span = self._span(axis)
        seconds = self.network.seconds(verb, elements * size, span)
        if verb == "all_to_all":
            sent = int(elements * size * (span.size - 1) / span.size)
        else:
            sent = ring_bytes(verb, int(elements), size, span.size)
        return Message(phase, verb, axis, tensor, sent, seconds, seconds, self.network.link(span))

    # -- inside a layer ----------------------------------------------------------------------------

    def layer(self, kind: LayerKind, cost: UnitCost, policy: str) -> list[Message]:
        """One layer and one micro-batch; with ``policy`` full the repeated forward (phase ``recompute``) too."""
        found = [*self._tensor(kind), *self._context(cost), *self._expert(kind)]
        if policy == "full":
            again = [m for m in found if m.phase == "F" and (m.axis != "cp" or self.layout.cp_kind == "ulysses")]
            found += [replace(message, phase="recompute") for message in again]  # other kinds of cp keep attention's output
        return found

    def _tensor(self, kind: LayerKind) -> Iterator[Message]:
        if self.layout.tp == 1:
            return
        elements = self.shape.tokens * self.model.dim
        parts = ["attention", "mlp"]
        if kind.moe:  # routed experts see the tokens of their own rank; a shared expert is split like a dense MLP
            parts = parts if self.model.moe is not None and self.model.moe.shared_dim else ["attention"]
        hidden = max(self.stack.tp_overlap, self.stack.async_tp * (1 - 1 / self.layout.tp_overlap))
        for part in parts:
            for message in self._pair(part, elements):
                yield message.hidden(hidden)

    def _pair(self, part: str, elements: float) -> Iterator[Message]:
        """The operators around one column-then-row pair."""
        if not self.layout.sequence_parallel:
            yield self._collective("F", "all_reduce", "tp", f"{part}.out", elements, self.size)
            yield self._collective("B", "all_reduce", "tp", f"{part}.in", elements, self.size)
            return
        yield self._collective("F", "all_gather", "tp", f"{part}.in", elements, self.size)
        yield self._collective("F", "reduce_scatter", "tp", f"{part}.out", elements, self.size)
        yield self._collective("B", "all_gather", "tp", f"{part}.out", elements, self.size)
        yield self._collective("B", "reduce_scatter", "tp", f"{part}.in", elements, self.size)
        yield self._collective("W", "all_gather", "tp", f"{part}.in", elements, self.size)

    def kv_block_elements(self) -> float:
        """Keys and values of a rank's own tokens, or their latent."""
        model = self.model
        if model.mla is not None:
            return self.shape.tokens * (model.mla.kv_lora_rank + model.mla.rope_head_dim)
        return 2 * self.shape.tokens * max(model.num_kv_heads / self.layout.tp, 1) * model.head_dim

    def _context(self, cost: UnitCost) -> Iterator[Message]:
        c = self.layout.cp
        if c == 1:
            return
        block = self.kv_block_elements()
        wide = 8 if self.layout.precision == "fp64" else ACCUMULATION_BYTES
        if self.layout.cp_kind == "ring":
            beside = cost.attention_forward / c  # one block's compute hides one block's transfer
            yield self._ring("F", "kv", block * self.size, c - 1, beside)
            yield self._ring("B", "kv", block * self.size, c - 1, 2.5 * beside)
            yield self._ring("B", "kv.gradient", block * wide, c, 2.5 * beside)
        elif self.layout.cp_kind == "allgather":
            yield self._collective("F", "all_gather", "cp", "kv", block * c, self.size)
            yield self._collective("B", "all_gather", "cp", "kv", block * c, self.size)
            yield self._collective("B", "reduce_scatter", "cp", "kv.gradient", block * c, wide)
        else:  # a KV head goes to as many ranks as share it
            heads = 2 * self.shape.tokens * self.model.num_heads / self.layout.tp * self.model.head_dim
            kv_heads = max(self.model.num_kv_heads / self.layout.tp, 1)
            block *= max(kv_heads, c) / kv_heads if self.model.mla is None else 1
            for phase in ("F", "B"):
                yield self._collective(phase, "all_to_all", "cp", "heads", heads + block, self.size)

    def _ring(self, phase: str, tensor: str, num_bytes: float, hops: int, beside: float) -> Message:
        """``hops`` transfers to the next rank of the cp ring, each beside the compute of one block."""
        distance = self._distance("cp")
        seconds = self.network.send_seconds(num_bytes, distance)
        exposed = max(0.0, seconds - beside)
        return Message(
            phase, "send", "cp", tensor, int(num_bytes), seconds, exposed, self.network.send_link(distance), hops
        )

    def _distance(self, axis: str) -> int:
        """Ranks between neighbours of an axis; at a node's edge a neighbour is on the next node, the slowest hop counts."""
        group = {"cp": self.layout.tp, "pp": self.layout.tp * self.layout.cp}[axis]
        if axis == "pp" and self.layout.order == "tp-cp-dp-pp":
            group *= self.layout.dp
        reach = group * (self.layout.cp if axis == "cp" else self.layout.pp)
        inside = [size for size in self.network.sizes if reach <= size]
        if inside:
            return group
        outer = [size for size in self.network.sizes if group < size]
        return max([group, *(size for size in outer if size < reach)])

    def _expert(self, kind: LayerKind) -> Iterator[Message]:
        if not kind.moe or self.layout.ep == 1:
            return
        assert self.model.moe is not None
        own, moe, ep = self.shape.tokens / self.layout.tp, self.model.moe, self.layout.ep
        rows = own * moe.top_k
        if self.layout.ep_deduplicate:  # one for each rank that has some expert of a token
            rows = own * ep * touched_share(moe.num_experts, ep, moe.top_k)
        hidden = max(self.stack.ep_overlap, 0.5 if self.layout.ep_overlap else 0.0)
        for phase in ("F", "B"):
            for tensor in ("dispatch", "combine"):
                message = self._collective(phase, "all_to_all", "ep", tensor, rows * self.model.dim, self.size)
                yield message.hidden(hidden)

    # -- ends and boundaries -----------------------------------------------------------------------

    def embedding(self) -> list[Message]:
        """Rows of the split table are summed once; the gradient of the sum is whole already."""
        if self.layout.tp == 1:
            return []
        elements = self.shape.tokens * self.model.dim
        if not self.layout.sequence_parallel:
            return [self._collective("F", "all_reduce", "tp", "embedding", elements, self.size)]
        return [
            self._collective("F", "reduce_scatter", "tp", "embedding", elements, self.size),
            self._collective("B", "all_gather", "tp", "embedding", elements, self.size),
        ]

    def head(self) -> list[Message]:
        """Tokens before the split logits (kept for backward), and three reductions of one number per token in cross entropy."""
        if self.layout.tp == 1:
            return []
        elements = self.shape.tokens * self.model.dim
        found = [self._collective("F", "all_reduce", "tp", "cross entropy", self.shape.tokens, 4).times(3)]
        if not self.layout.sequence_parallel:
            return [*found, self._collective("B", "all_reduce", "tp", "head.in", elements, self.size)]
        found.append(self._collective("F", "all_gather", "tp", "head.in", elements, self.size))
        found.append(self._collective("B", "reduce_scatter", "tp", "head.in", elements, self.size))
        return found

    def boundary(self) -> list[Message]:
        """One stage boundary and one micro-batch: activations forward, their gradients backward."""
        if self.layout.pp == 1:
            return []
        pieces = self.layout.tp if self.stack.scatter_gather else self.shape.split
        num_bytes = self.shape.tokens * self.model.dim * self.size / pieces
        distance = self._distance("pp")
        seconds = self.network.send_seconds(num_bytes, distance)
        exposed = seconds * (1 - self.stack.p2p_overlap)
        link = self.network.send_link(distance)
        return [
            Message(phase, "send", "pp", tensor, int(num_bytes), seconds, exposed, link)
            for phase, tensor in (("F", "activations"), ("B", "gradients"))
        ]

    # -- once a step, or a unit --------------------------------------------------------------------

    def data(self, held: Parameters, num_units: int, tied: int, trained: Parameters | None = None) -> list[Message]:
        """Gradients and parameters of a rank over the ranks that hold the same slice (``seconds`` fully exposed here).

        ``num_units``: the pieces in which fully sharded parameters are gathered; buckets hold a unit or ``bucket_mb``.
        ``tied``: elements of a matrix that both pipeline ends hold. ``trained``: those of ``held`` with gradients (all).
        """
        found: list[Message] = []
        learning = held if trained is None else trained
        for count, with_gradients, axis, tensor in (
            (held.dense, learning.dense, "dp_cp", "dense"),
            (held.experts, learning.experts, "edp", "experts"),
        ):
            if count:
                found += self._sharded(count, with_gradients, axis, tensor, max(1, num_units))
        size = self._gradient_size()
        if tied:
            ends = replace_ends(self.network, self.grid)
            seconds = self.network.seconds("all_reduce", tied * size, ends)
            sent = ring_bytes("all_reduce", tied, size, 2)
            found.append(
                Message("reduce", "all_reduce", "pp", "tied embedding", sent, seconds, seconds, self.network.link(ends))
            )
        return found

    def _gradient_size(self) -> int:
        wide = 8 if self.layout.precision == "fp64" else 4
        return wide if self.layout.reduce_dtype == "fp32" else GRADIENT_BYTES[self.layout.reduce_dtype]

    def _sharded(self, total: int, trained: int, axis: str, tensor: str, pieces: int) -> list[Message]:
        layout, m = self.layout, self.layout.microbatches
        shard, copies = self._shard_spans(axis)
        grad, param = self._gradient_size(), PARAMETER_BYTES.get(layout.precision, 2)
        if layout.zero < 3:
            pieces = max(1, min(pieces, round(trained * grad / (layout.bucket_mb * 2**20))))
        whole, count = -(-total // pieces), -(-trained // pieces)

        def over(span: Span, phase: str, verb: str, name: str, elements: int, size: int, times: int) -> list[Message]:
            if span.size == 1 or not elements:
                return []
            seconds = self.network.seconds(verb, elements * size, span)
            sent = ring_bytes(verb, elements, size, span.size)
            return [
                Message(
                    phase,
                    verb,
                    axis,
                    f"{tensor} {name}",
                    sent,
                    seconds,
                    seconds,
                    self.network.link(span),
                    times * pieces,
                )
            ]

        reductions = m if layout.accumulate == "reduce" else 1
        if layout.zero == 0:
            return over(_joined(shard, copies), "reduce", "all_reduce", "gradients", count, grad, reductions)
        own = -(-count // shard.size)
        replicas = over(copies, "reduce", "all_reduce", "gradient shards", own, grad, 1)
        if layout.zero == 1 and layout.zero1_reduce == "allreduce":
            reduce = over(shard, "reduce", "all_reduce", "gradients", count, grad, reductions)
        else:
            reduce = over(shard, "reduce", "reduce_scatter", "gradients", count, grad, reductions)
        if layout.zero < 3:
            return [*reduce, *replicas, *over(shard, "update", "all_gather", "parameters", count, param, 1)]
        if not layout.keeps_gathered:
            gathers = over(shard, "F", "all_gather", "parameters", whole, param, m)
            gathers += over(shard, "B", "all_gather", "parameters", whole, param, m)
        else:
            times = 1 if layout.accumulate == "defer" else m
            gathers = over(shard, "F", "all_gather", "parameters", whole, param, times)
        return [*gathers, *reduce, *replicas]

    def _shard_spans(self, axis: str) -> tuple[Span, Span]:
        """The group that shards and, with hybrid sharding, the group of its replicas."""
        replicas, grid = self.layout.dp_replicate, self.grid
        whole = self._span(axis)
        if replicas == 1:
            return whole, Span(tuple(1 for _ in whole.ways))
        if axis == "edp" or grid.dp % replicas:  # outer ranks are the replicas: split the outermost level first
            return _split(whole, replicas)
        inner = replace(grid, dp=grid.dp // replicas, ep=1)
        outer = RankGrid(tp=grid.tp, cp=grid.cp * grid.dp // replicas, dp=replicas, pp=grid.pp, order=grid.order)
        return self.network.span(inner, "dp_cp"), self.network.span(outer, "dp")


def _joined(first: Span, second: Span) -> Span:
    return Span(tuple(a * b for a, b in zip(first.ways, second.ways, strict=True)))


def _split(span: Span, replicas: int) -> tuple[Span, Span]:
    inner, outer, left = [], [], replicas
    for ways in reversed(span.ways):
        taken = next(k for k in range(min(ways, left), 0, -1) if ways % k == 0 and left % k == 0)
        outer.append(taken)
        inner.append(ways // taken)
        left //= taken
    return Span(tuple(reversed(inner))), Span(tuple(reversed(outer)))


def replace_ends(network: Network, grid: RankGrid) -> Span:
    """The two pipeline ends that share a tied matrix: two ranks on the outermost link between them."""
    index = network.span(grid, "pp").outermost()
    return Span(tuple(2 if level == index else 1 for level in range(len(network.sizes))))
