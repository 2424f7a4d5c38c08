"""`nn.Linear` with its weight gradient left for W: the same values as autograd's, later."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from shardwright.ops.deferred import deferrable, deferring
from shardwright.ops.gradients import GradQueue


class Net(nn.Module):
    """Layers with and without a bias, one that is used twice, a frozen one, and one that is repeated in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(3, 5), nn.Linear(5, 5, bias=False)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.normed, self.last = weight_norm(nn.Linear(5, 5)), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(self.again(torch.tanh(self.first(x)))))
        x = self.normed(self.frozen(x))
        y: Tensor = checkpoint(self.last, x, use_reentrant=False)
        return y


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def make(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (3,)])
def test_values_are_those_of_autograd_and_weights_come_with_w(shape: tuple[int, ...], autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.float64
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    context: Callable[[], torch.autocast | nullcontext[None]] = (
        (lambda: torch.autocast("cpu", torch.bfloat16)) if autocast else nullcontext
    )
    plain, split = make(dtype), make(dtype)
    with context():
        plain(x).float().square().sum().backward()
    queue = GradQueue()
    layers = deferrable(split)
    assert len(layers) == 5
    with deferring(layers, queue):
        with context():
            loss = split(x).float().square().sum()
        queue.defer = True
        loss.backward()
    queue.defer = False
    early = gradients(split)
    writes = queue.take()
    with torch.no_grad():
        for write in writes:
            write()
    expected = gradients(plain)
    assert len(writes) == 4  # first, again twice, last
    assert expected.keys() - early.keys() == {"first.weight", "again.weight", "last.weight"}
    for name, gradient in gradients(split).items():
        scale = expected[name].abs().max().item()
        assert gradient.dtype == expected[name].dtype
        assert (gradient - expected[name]).abs().max().item() <= (2e-2 if autocast else 1e-12) * scale, name


def test_hooks_see_a_weight_gradient_once_when_it_is_there() -> None:
    layer, queue, seen = nn.Linear(2, 2), GradQueue(), []
    layer.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.shape))
    with deferring([layer], queue):
        loss = layer(torch.ones(1, 2)).sum()
        queue.defer = True
        loss.backward()
    assert seen == []
    for write in queue.take():
        write()
    assert seen == [(2, 2), (2, 2)]


def test_layers_are_what_they_were_afterwards() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    layer = nn.Linear(2, 2)
    assert deferrable(nn.Sequential(Own(2, 2), layer, nn.Tanh())) == [layer]
    with pytest.raises(ZeroDivisionError), deferring([layer], GradQueue()):
        assert "forward" in vars(layer)
        raise ZeroDivisionError
    assert "forward" not in vars(layer)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    assert deferrable(layer) == []


def test_without_gradients_and_where_a_queue_does_not_wait() -> None:
    layer, queue = nn.Linear(2, 2), GradQueue()
    with deferring([layer], queue):
        with torch.no_grad():
            assert not layer(torch.ones(1, 2)).requires_grad
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[1, 1], [1, 1]]
