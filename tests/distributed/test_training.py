"""Context parallelism together with what a training step has: torch.compile, FSDP2, checkpoints."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from sparse_layer import KEYS, QUERIES, SCALE, Sizes, inputs, relative_error
from support.checkout import EXAMPLES
from support.processes import on_ranks, rank_counts, skip_unless_gloo_averages
from support.turns import nightly
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

SIZES = Sizes()
LENGTHS = [19, 6, 40]


def local_leaves(shards: SequenceShards, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    tokens = inputs(list(shards.lengths), dtype, SIZES)
    return {name: shards.shard(tokens[name]).requires_grad_() for name in (*QUERIES, *KEYS)}


def layer(
    shards: SequenceShards, x: dict[str, Tensor], method: Any = "allgather", **options: Any
) -> Tensor:
    """A loss with a gradient of every input."""
    projections = x["query_index"], x["key_index"], x["weights"]
    ropes = {"query_rope": x["query_rope"], "key_rope": x["key_rope"], "scale_value": SCALE}
    indices, values = distributed.lightning_indexer(
        *projections, shards=shards, sparse_count=SIZES.count, return_values=True
    )
    out, *statistics = distributed.sparse_flash_attention(
        x["query"], x["latent"], x["latent"], indices, **ropes, shards=shards, **options
    )
    loss = distributed.lightning_indexer_kl_loss(
        x["query"], x["latent"], *projections, indices, *statistics, **ropes, shards=shards,
        reduction="mean",
    )  # fmt: skip
    key = x["latent"].expand_as(x["query"])
    dense, *_ = distributed.flash_attention_score(
        x["query"], key, key.flip(-1), num_heads=SIZES.heads, shards=shards, sparse_mode=3,
        method=method,
    )  # fmt: skip
    kept = values.masked_fill(values.isinf(), 0)
    return out.sin().sum() + loss + kept.sin().sum() + dense.sin().sum()


def gradients(x: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    return dict(zip(x, torch.autograd.grad(loss, list(x.values())), strict=True))


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        assert x.abs().sum() > 0 or not x.numel(), name
        assert torch.equal(actual[name], x), name


def compiled(group: ProcessGroup, lengths: list[int]) -> None:
    with ops.limits(None):
        shards = SequenceShards(lengths, group)
        x = local_leaves(shards)
        expected = layer(shards, x)
        torch._dynamo.reset()
        step = torch.compile(layer, fullgraph=True, backend="aot_eager")
        actual = step(shards, x)
        assert torch.equal(actual, expected)
        same(gradients(x, actual), gradients(x, expected))


@pytest.mark.smoke
def test_compile() -> None:
    on_ranks(2, compiled, LENGTHS)


@nightly
def test_compile_for_ranks_with_different_numbers_of_parts() -> None:
    on_ranks(3, compiled, [4, 1, 1])


def compiled_for_a_rank_without_tokens(group: ProcessGroup) -> str:
    with ops.limits(None):
        shards = SequenceShards([2], group)
        torch._dynamo.reset()
        step = torch.compile(layer, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match="expected tokens on every rank") as caught:
            step(shards, local_leaves(shards))
        # Where the graph may break, these calls run as without torch.compile.
        torch._dynamo.reset()
        x = local_leaves(shards)
        expected = layer(shards, x)
        actual = torch.compile(layer, backend="aot_eager")(shards, x)
        assert torch.equal(actual, expected)
        wanted = gradients(x, expected)
        assert all(torch.equal(d, wanted[name]) for name, d in gradients(x, actual).items())
        return str(caught.value)


@pytest.mark.smoke
def test_compile_refuses_a_rank_without_tokens() -> None:
    for text in on_ranks(3, compiled_for_a_rank_without_tokens):
        assert (
            "shards: expected tokens on every rank under torch.compile, got none on rank 1" in text
        )


def in_autocast(group: ProcessGroup, compiled: bool) -> None:
    """As with arguments in bfloat16, and gradients in the dtype of the leaves."""
    methods = ("allgather", "ulysses") if compiled else ("allgather", "ulysses", "ring")
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = local_leaves(shards, torch.float32)
        half = {name: leaf.bfloat16() for name, leaf in x.items()}
        expected = sum(layer(shards, half, method=method) for method in methods)
        wanted = gradients(x, expected)
        torch._dynamo.reset()
        step = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(step(shards, x, method=method) for method in methods)
        assert torch.equal(loss, expected)
        for name, d in gradients(x, loss).items():
            assert d.dtype == torch.float32
            # Gradients of several functions are added in float32 here, in bfloat16 there.
            assert relative_error(d, wanted[name]) <= 1e-2, name


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=nightly)], ids=["eager", "compiled"]
)
def test_autocast(compiled: bool) -> None:
    on_ranks(2, in_autocast, compiled)


def in_autocast_of_one_rank(group: ProcessGroup) -> None:
    """Without a common dtype to travel in, all ranks take the tensors as they are."""
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        for dtype in (torch.float32, torch.bfloat16):
            x = local_leaves(shards, dtype)
            for method in ("allgather", "ulysses", "ring"):
                expected = layer(shards, x, method=method)
                here = torch.autocast("cpu", torch.float16, enabled=group.rank() == 1)
                with here, pytest.warns(UserWarning, match=r"autocast: expected the same on all"):
                    loss = layer(shards, x, method=method)
                assert torch.equal(loss, expected)
                same(gradients(x, loss), gradients(x, expected))


def test_autocast_on_one_rank() -> None:
    on_ranks(2, in_autocast_of_one_rank)


def recomputed(group: ProcessGroup) -> None:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = local_leaves(shards)
        expected = layer(shards, x)
        wanted = gradients(x, expected)
        for reentrant in (False, True):
            loss = checkpoint(layer, shards, x, use_reentrant=reentrant) if not reentrant else (
                checkpoint(
                    lambda *tensors: layer(shards, dict(zip(x, tensors, strict=True))),
                    *x.values(), use_reentrant=True,
                )
            )  # fmt: skip
            assert torch.equal(loss, expected)
            if not reentrant:
                same(gradients(x, loss), wanted)
            else:
                loss.backward()
                same({name: leaf.grad for name, leaf in x.items()}, wanted)


@pytest.mark.smoke
def test_activation_checkpointing() -> None:
    on_ranks(3, recomputed)


def kept(group: ProcessGroup) -> None:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = local_leaves(shards)
        plain, keeping = (layer(shards, x, save_gathered=save) for save in (False, True))
        same(gradients(x, keeping), gradients(x, plain))


def test_saved_keys_give_the_same_gradients() -> None:
    on_ranks(2, kept)


def indexer_values(group: ProcessGroup) -> None:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        tokens = inputs(LENGTHS, torch.float64, SIZES)
        names = ("query_index", "key_index", "weights")
        whole = {name: tokens[name].clone().requires_grad_() for name in names}
        local = {name: shards.shard(tokens[name]).requires_grad_() for name in names}
        ends = torch.tensor(LENGTHS).cumsum(0).int()
        options = {"sparse_count": SIZES.count, "return_values": True}
        _, expected = ops.lightning_indexer(
            *whole.values(), layout="TND", actual_seq_lengths_query=ends,
            actual_seq_lengths_key=ends, **options,
        )  # fmt: skip
        _, actual = distributed.lightning_indexer(*local.values(), shards=shards, **options)
        assert torch.equal(actual, shards.shard(expected))
        for values in (expected, actual):
            values.masked_fill(values.isinf(), 0).sin().sum().backward()
        for name in names:
            found = shards.unshard(local[name].grad)
            assert relative_error(found, whole[name].grad) <= 1e-14, name


@rank_counts(2, 4)
def test_gradients_through_the_indexers_values(ranks: int) -> None:
    on_ranks(ranks, indexer_values)


def weighted(group: ProcessGroup) -> None:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        tokens = inputs(LENGTHS, torch.float64, SIZES)
        generator = torch.Generator().manual_seed(3)
        weight = torch.randint(3, (sum(LENGTHS),), generator=generator).double()
        ends = list(accumulate(LENGTHS))
        packed = {
            "layout": "TND", "actual_seq_lengths_query": ends, "actual_seq_lengths_key": ends,
        }  # fmt: skip
        choices: list[dict[str, Any]] = [
            {"reduction": "mean"}, {"normalizer": 7}, {"normalizer": torch.tensor([2.5])},
        ]  # fmt: skip
        for options in choices:
            whole = kl_loss(ops, tokens, weight, **packed, **options)
            local = {name: shards.shard(x) for name, x in tokens.items()}
            mine = shards.shard(weight)
            actual = kl_loss(distributed, local, mine, shards=shards, **options)
            torch.testing.assert_close(actual[0], whole[0], rtol=1e-14, atol=0)
            for x, y in zip(actual[1:], whole[1:], strict=True):
                assert relative_error(shards.unshard(x), y) <= 1e-14


def kl_loss(
    functions: Any, tokens: dict[str, Tensor], weight: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    """Returns the loss and its gradients; the selection has no axis of heads."""
    x = {name: tokens[name].clone().requires_grad_() for name in (*QUERIES, *KEYS)}
    projections = x["query_index"], x["key_index"], x["weights"]
    ropes = {"query_rope": x["query_rope"], "key_rope": x["key_rope"], "scale_value": SCALE}
    where = {name: y for name, y in options.items() if name not in ("reduction", "normalizer")}
    on_device = {
        name: torch.tensor(y, dtype=torch.int32) if isinstance(y, list) else y
        for name, y in where.items()
    }
    indices, _ = functions.lightning_indexer(*projections, sparse_count=SIZES.count, **on_device)
    _, *statistics = functions.sparse_flash_attention(
        x["query"], x["latent"], x["latent"], indices.squeeze(1), **ropes, **on_device
    )
    loss = functions.lightning_indexer_kl_loss(
        x["query"], x["latent"], *projections, indices.squeeze(1), *statistics, **ropes,
        weight=weight, **options,
    )  # fmt: skip
    return loss.detach(), *torch.autograd.grad(loss, projections)


@rank_counts(3, 1)
def test_weighted_loss(ranks: int) -> None:
    on_ranks(ranks, weighted)


def other_options(group: ProcessGroup) -> None:
    """Without ropes, with value apart from key, blocks of keys, and in mode 0."""
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        tokens = inputs(LENGTHS, torch.float64, SIZES)
        tokens["value"] = tokens["latent"].flip(-1)
        names = ("query", "latent", "value")
        ends = torch.tensor(LENGTHS).cumsum(0).int()
        for mode, block in ((3, 1), (0, 1), (3, 4)):
            # Slots behind those that are read hold any keys that exist.
            blocks = torch.tensor([-(-n // block) for n in LENGTHS]).repeat_interleave(
                torch.tensor(LENGTHS)
            )
            slots = torch.arange(SIZES.count)
            indices = (slots % blocks[:, None]).int().unsqueeze(1)
            options = {"scale_value": SCALE, "sparse_mode": mode, "sparse_block_size": block}
            whole = {name: tokens[name].clone().requires_grad_() for name in names}
            local = {name: shards.shard(tokens[name]).requires_grad_() for name in names}
            expected, *_ = ops.sparse_flash_attention(
                *whole.values(), indices, layout="TND", actual_seq_lengths_query=ends,
                actual_seq_lengths_key=ends, **options,
            )  # fmt: skip
            actual, *_ = distributed.sparse_flash_attention(
                *local.values(), shards.shard(indices), shards=shards, **options
            )
            assert torch.equal(actual, shards.shard(expected))
            expected.backward(tokens["d_out"])
            actual.backward(shards.shard(tokens["d_out"]))
            for name in names:
                found = shards.unshard(local[name].grad)
                assert relative_error(found, whole[name].grad) <= 1e-14, name


def test_options_of_the_attention() -> None:
    on_ranks(3, other_options)


def second_derivative(group: ProcessGroup) -> None:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = local_leaves(shards)
        first = torch.autograd.grad(layer(shards, x), list(x.values()), create_graph=True)
        with pytest.raises(RuntimeError, match=r"once_differentiable"):
            sum(d.sum() for d in first).backward()


def test_second_derivative_is_an_error() -> None:
    on_ranks(2, second_derivative)


def backward_under_other_limits(group: ProcessGroup) -> None:
    shards = SequenceShards(LENGTHS, group)
    x = local_leaves(shards)
    query = x["query"]
    calls: dict[str, Callable[[], Tensor]] = {"sparse": lambda: layer(shards, x)}
    for method in ("ring", "ulysses"):
        calls[method] = lambda method=method: distributed.flash_attention_score(
            query, query, query, num_heads=SIZES.heads, shards=shards, method=method, sparse_mode=3
        )[0].sum()  # type: ignore[misc]
    for name, call in calls.items():
        with ops.limits(None):
            loss = call()
        # Far from what any product accepts: the backward is checked as its forward was.
        loss.backward()
        assert query.grad is not None, name
        query.grad = None


def test_limits_hold_in_the_backward() -> None:
    on_ranks(2, backward_under_other_limits)


def example_model() -> tuple[Any, Any]:
    sys.path.insert(0, str(EXAMPLES))
    import sparse_lm

    torch.manual_seed(0)
    config = sparse_lm.ModelConfig(
        layers=2, hidden_size=32, heads=4, head_dim=8, latent_dim=16, rope_dim=8, index_heads=4,
        index_dim=16, top_k=8,
    )  # fmt: skip
    return sparse_lm.SparseLM(config).double(), sparse_lm.select_by_indexer


def fully_sharded(group: ProcessGroup) -> None:
    """Two ranks share the sequences, and two such groups the batch: as one process has it."""
    model, select = example_model()
    alone = copy.deepcopy(model)
    text = torch.randint(256, (4, 41), generator=torch.Generator().manual_seed(1))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("batch", "sequence"))
    context_parallel = mesh["sequence"].size()
    mine = text.chunk(2)[mesh["batch"].get_local_rank()]
    with ops.limits(None):
        shards = SequenceShards([40] * len(mine), mesh["sequence"].get_group())
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        losses = model(mine, select, shards)
        # FSDP averages over all ranks, but those of a sequence hold summands.
        (context_parallel * sum(losses)).backward()
        expected = alone(text, select)
        sum(expected).backward()
    averaged = torch.stack([x.detach() for x in losses])
    torch.distributed.all_reduce(averaged, group=mesh["batch"].get_group())
    # Each rank has the losses of its own sequences.
    torch.testing.assert_close(averaged / 2, torch.stack(expected).detach(), rtol=1e-12, atol=0)
    parameters = dict(model.named_parameters())
    for name, parameter in alone.named_parameters():
        gradient = parameters[name].grad.full_tensor()
        assert relative_error(gradient, parameter.grad) <= 1e-6, name


def test_fsdp_with_the_examples_model() -> None:
    on_ranks(4, fully_sharded)


def sharded_indexer(group: ProcessGroup) -> None:
    torch.manual_seed(0)
    hidden_size, length = 24, 30
    hidden = torch.randn(length, hidden_size)
    query, latent = torch.randn(length, 2, 32), torch.randn(length, 1, 32)
    indexer = ops.LightningIndexer(hidden_size, num_heads=4, head_dim=16, rope_dim=8)
    alone = copy.deepcopy(indexer)
    mesh = init_device_mesh("cpu", (group.size(),))
    with ops.limits(None):
        shards = SequenceShards([length], group)
        fully_shard(indexer, mesh=mesh)
        local, q, k = (shards.shard(x) for x in (hidden, query, latent))
        projections = indexer(local, shards.positions())
        indices, _ = distributed.lightning_indexer(*projections, shards=shards, sparse_count=8)
        _, *statistics = distributed.sparse_flash_attention(
            q, k, k, indices, scale_value=SCALE, shards=shards
        )
        loss = distributed.lightning_indexer_kl_loss(
            q, k, *projections, indices, *statistics, scale_value=SCALE, shards=shards
        )
        (group.size() * loss).backward()

        whole = alone(hidden.unsqueeze(0))
        q, k = query.unsqueeze(0), latent.unsqueeze(0)
        indices = alone.select(whole, 8)
        _, *statistics = ops.sparse_flash_attention(q, k, k, indices, scale_value=SCALE)
        expected = ops.lightning_indexer_kl_loss(
            q, k, *whole, indices, *statistics, scale_value=SCALE
        )
        expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    parameters = dict(indexer.named_parameters())
    for name, parameter in alone.named_parameters():
        assert relative_error(parameters[name].grad.full_tensor(), parameter.grad) <= 1e-5, name


@pytest.mark.smoke
def test_fsdp_with_the_indexer() -> None:
    skip_unless_gloo_averages()
    on_ranks(4, sharded_indexer)
