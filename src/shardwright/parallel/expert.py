"""Expert parallelism: what a layer with experts needs of other ranks.

EP:  W_up[E/ep, 2F, D], W_down[E/ep, D, F]  |  router and attention as without it
"""

from __future__ import annotations

from shardwright.comm.mesh import Mesh
from shardwright.ops.routing import Exchange, LocalExchange, LocalSums, RouterSums


def make_exchange(mesh: Mesh, num_experts: int) -> Exchange:
    """Dispatch and combine over the ``ep`` axis."""
    return LocalExchange()


def make_sums(mesh: Mesh) -> RouterSums:
    """Sums over the ranks that hold tokens of the same micro-batch or sequence."""
    return LocalSums()
