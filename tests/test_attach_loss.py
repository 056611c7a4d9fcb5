"""attach_loss: a loss whose gradient joins the backward of another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from ascend_attn_ops import attach_loss
from ascend_attn_ops._arguments import warn_once
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def layer(hidden: Tensor, main: Tensor, side: Tensor, attach: Callable[..., Tensor]) -> Tensor:
    """A linear layer, and a second one that learns to imitate it: the hidden state is detached."""
    output = hidden @ main
    return attach(output, ((hidden.detach() @ side - output.detach()) ** 2).mean())


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, main, side = (torch.randn(4, 4, generator=generator) for _ in range(3))
    return hidden, main.requires_grad_(), side.requires_grad_()


def gradients_of_the_sum(scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the gradients of the trainer's loss with the attached ones added by hand."""
    hidden, main, side = leaves()
    losses = []

    def keep(output: Tensor, loss: Tensor) -> Tensor:
        losses.append(loss)
        return output

    output = layer(layer(hidden, main, side, keep), main, side, keep)
    (output.sum() + scale * sum(losses)).backward()
    assert main.grad is not None
    assert side.grad is not None
    return output.detach(), main.grad, side.grad


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0])
@pytest.mark.parametrize(
    ("compiled", "recompute"),
    [(False, None), (False, False), (False, True), (True, None), (True, False)],
    ids=["eager", "checkpoint", "reentrant-checkpoint", "compiled", "compiled-checkpoint"],
)
def test_gradients_are_those_of_the_sum_of_losses(
    scale: float, compiled: bool, recompute: bool | None
) -> None:
    """`recompute` is the use_reentrant of a checkpoint, None for none."""

    def one(hidden: Tensor, main: Tensor, side: Tensor) -> Tensor:
        return layer(hidden, main, side, lambda output, loss: attach_loss(output, loss, scale))

    def function(hidden: Tensor, main: Tensor, side: Tensor) -> Tensor:
        for _ in range(2):
            if recompute is None:
                hidden = one(hidden, main, side)
            else:
                hidden = checkpoint(one, hidden, main, side, use_reentrant=recompute)
        return hidden

    torch._dynamo.reset()
    run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    hidden, main, side = leaves()
    output = run(hidden, main, side)
    output.sum().backward()
    expected = gradients_of_the_sum(scale)
    for actual, other in zip((output, main.grad, side.grad), expected, strict=True):
        torch.testing.assert_close(actual, other)


def test_output_is_unchanged_and_the_loss_needs_no_gradient_of_it() -> None:
    """As in a warm-up, where all but the indexer is frozen."""
    output, parameter = torch.randn(3), torch.ones(2, requires_grad=True)
    attached = attach_loss(output, (parameter**2).sum())
    assert torch.equal(attached, output)
    assert attached.data_ptr() == output.data_ptr()
    attached.sum().backward()
    assert torch.equal(parameter.grad, torch.full((2,), 2.0))


def test_scale_is_read_in_the_backward() -> None:
    """On its device: a GradScaler has its factor there."""
    parameter = torch.ones(2, requires_grad=True)
    scale = torch.tensor([65536.0], dtype=torch.float64)
    attach_loss(torch.ones(3), (parameter**2).sum(), scale).sum().backward()
    assert torch.equal(parameter.grad, torch.full((2,), 2 * 65536.0))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_no_value_is_read(as_tensor: bool) -> None:
    """A meta tensor has no values: an operation that waits for the device would fail on it."""
    with torch.device("meta"):
        output, parameter = (torch.ones(3, requires_grad=True) for _ in range(2))
        scale = torch.ones(()) if as_tensor else 2.0
        attach_loss(output, (parameter**2).sum(), scale).sum().backward()
    assert parameter.grad is not None
    assert output.grad is not None


def test_gradient_accumulation() -> None:
    parameter = nn.Parameter(torch.ones(2))
    for _ in range(3):
        attach_loss(torch.ones(1), parameter.sum(), scale=1 / 3).sum().backward()
    torch.testing.assert_close(parameter.grad, torch.ones(2))


@pytest.fixture
def no_warning_yet() -> Iterator[None]:
    warn_once.cache_clear()
    yield
    warn_once.cache_clear()


@pytest.mark.usefixtures("no_warning_yet")
def test_a_loss_without_gradient_warns_once() -> None:
    output, parameter = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach_loss(output, parameter.sum())
        attach_loss(output.detach(), parameter.sum())
        with torch.no_grad():
            attach_loss(output, parameter.sum())
    with pytest.warns(UserWarning, match="attach_loss: loss: requires no gradient") as seen:
        attached = [attach_loss(output, parameter.detach().sum()) for _ in range(3)]
    assert len(attached) == 3
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_under_torch_func() -> None:
    def function(parameter: Tensor, output: Tensor) -> Tensor:
        return attach_loss(output, (parameter**2).sum(), 0.5).sum()

    parameter, output = torch.randn(3, 2), torch.randn(3, 4)
    assert torch.equal(torch.func.grad(function)(parameter, output), parameter)
    per_sample = torch.func.vmap(torch.func.grad(function))(parameter, output)
    assert torch.equal(per_sample, parameter)
