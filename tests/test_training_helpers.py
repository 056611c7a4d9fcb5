"""save_attention_policy: what a checkpoint keeps is not computed again. attach_loss."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import attach_loss
from ascend_attn_ops._core.arguments import warn_once
from support.dispatched import Calls
from support.samples import FIRST_DIFFERENTIABLE
from support.tolerance import assert_same_bits
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

pytestmark = pytest.mark.usefixtures("no_limits")

save_attention = partial(create_selective_checkpoint_contexts, ops.save_attention_policy)


def dsa_layer(hidden: Tensor, indexer: ops.LightningIndexer, query: Tensor, key: Tensor) -> Tensor:
    """Sparse attention with its indexer and its loss, dense and windowed attention, and a merge."""
    q = (hidden @ query).unflatten(-1, (2, 16))
    latent = (hidden @ key).unsqueeze(-2)
    projections = indexer(hidden.detach())
    indices = indexer.select(projections, 4)
    out, *statistics = ops.sparse_flash_attention(q, latent, latent, indices, scale_value=0.25)
    loss = ops.lightning_indexer_kl_loss(
        q, latent, *projections, indices, *statistics, scale_value=0.25
    )
    dense, maximum, total = ops.flash_attention_score(q, q, q, num_heads=2, layout="BSND")
    lse = (maximum + total.log())[..., 0].transpose(1, 2)
    merged, _ = ops.attention_update([lse, lse], [out, dense])
    windowed, _ = ops.sparse_flash_mla(q, latent, scale_value=0.25)
    return ops.attach_loss(hidden + (merged + windowed).flatten(-2), loss)


def train_step(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
    """The gradients of two layers."""
    torch.manual_seed(0)
    indexer = ops.LightningIndexer(32, num_heads=2, head_dim=16, rope_dim=8)
    hidden, query, key = torch.randn(2, 6, 32), torch.randn(32, 32), torch.randn(32, 16)
    leaves = [*indexer.parameters(), *(x.requires_grad_() for x in (hidden, query, key))]
    x = hidden
    for _ in range(2):
        x = run(x, indexer, query, key)
    x.sum().backward()
    return tuple(leaf.grad for leaf in leaves)


def counted_step(run: Callable[..., Tensor]) -> tuple[tuple[Tensor, ...], Counter[str]]:
    """The gradients, and how often each operator was computed."""
    with Calls() as calls:
        return train_step(run), calls.count


FORWARDS = [recipe.operator.name for recipe in FIRST_DIFFERENTIABLE]


def test_each_forward_runs_once() -> None:
    expected, plain = counted_step(dsa_layer)
    kept, selective = counted_step(
        partial(checkpoint, dsa_layer, use_reentrant=False, context_fn=save_attention)
    )
    again, full = counted_step(partial(checkpoint, dsa_layer, use_reentrant=False))
    assert_same_bits(kept, expected)
    assert_same_bits(again, expected)
    assert {name: plain[name] for name in FORWARDS} == dict.fromkeys(FORWARDS, 2)
    assert {name: selective[name] for name in FORWARDS} == dict.fromkeys(FORWARDS, 2)
    # Without the policy the backward computes them again: the two counts can differ.
    assert {name: full[name] for name in FORWARDS} == dict.fromkeys(FORWARDS, 4)
    # Cheap operators are computed again.
    assert selective["mm"] > plain["mm"]


def test_each_forward_is_compiled_once() -> None:
    counts: Counter[str] = Counter()

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        counts.update(
            node.target._overloadpacket.__name__
            for node in graph.graph.nodes
            if isinstance(node.target, torch._ops.OpOverload)
        )
        return make_boxed_func(graph.forward)

    def run(*args: Any) -> Tensor:
        return checkpoint(dsa_layer, *args, use_reentrant=False, context_fn=save_attention)

    backend = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    torch._dynamo.reset()
    actual = train_step(torch.compile(run, fullgraph=True, backend=backend))
    # Both layers run the same graphs.
    assert {name: counts[name] for name in FORWARDS} == dict.fromkeys(FORWARDS, 1)
    torch.testing.assert_close(actual, train_step(dsa_layer))


def test_what_is_written_in_place_is_not_kept() -> None:
    policy = ops.save_attention_policy(None, torch.ops.ascend.scatter_pa_kv_cache_.default)
    assert policy == torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


# attach_loss: a loss whose gradient joins the backward of another.


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
    torch.testing.assert_close((output, main.grad, side.grad), tuple(expected))


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
