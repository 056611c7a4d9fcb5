"""save_attention_policy: what a checkpoint keeps is not computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from support.dispatched import Calls
from support.samples import FIRST_DIFFERENTIABLE
from support.tolerance import assert_same_bits
from torch import Tensor
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
