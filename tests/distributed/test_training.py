"""Context parallelism together with what a training step has: torch.compile, FSDP2, checkpoints."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import compressed_layer
import pytest
import sparse_layer
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from compressed_layer import COUNT, CSA, DIM, INDEX_DIM, LEFT
from sparse_layer import KEYS, QUERIES, SCALE, Sizes, gradients, inputs, relative_error, same
from support.checkout import EXAMPLES
from support.processes import on_ranks, rank_counts
from support.torch_defects import NOT_WITH_2_7
from support.turns import nightly
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

SIZES = Sizes()
LENGTHS = [19, 6, 40]
METHODS = ("allgather", "ulysses", "ring")


def local_leaves(shards: SequenceShards, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    tokens = inputs(list(shards.lengths), dtype, SIZES)
    leaves = {name: shards.shard(tokens[name]).requires_grad_() for name in (*QUERIES, *KEYS)}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    # No rounding to bfloat16 leaves these as they are.
    sink = torch.linspace(-2, 2 + 2**-20, SIZES.heads, dtype=wide)
    return {**leaves, "sink": sink.requires_grad_()}


def layer(
    shards: SequenceShards, x: dict[str, Tensor], method: Any = "allgather", **options: Any
) -> Tensor:
    """A loss with a gradient of every input."""
    found = sparse_layer.forward(
        x, distributed, SIZES, {"shards": shards}, values=True, loss={"reduction": "mean"},
        **options,
    )  # fmt: skip
    key, key_rope = (x[name].expand(-1, SIZES.heads, -1) for name in ("latent", "key_rope"))
    dense, *_ = distributed.flash_attention_score(
        x["query"], key, key.flip(-1), num_heads=SIZES.heads, shards=shards, sparse_mode=3,
        method=method, sink=x["sink"], query_rope=x["query_rope"], key_rope=key_rope, **options,
    )  # fmt: skip
    kept = found["values"].masked_fill(found["values"].isinf(), 0)
    return found["out"].sin().sum() + found["loss"] + kept.sin().sum() + dense.sin().sum()


def compressed_leaves(
    shards: SequenceShards, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    shards.compressed(CSA.ratio)  # before compiled code
    tokens = compressed_layer.inputs(list(shards.lengths), CSA, dtype)
    return compressed_layer.leaves_of({k: shards.shard(x) for k, x in tokens.items()}, CSA)


def compressed(shards: SequenceShards, x: dict[str, Tensor], **options: Any) -> Tensor:
    functions = compressed_layer.of_a_rank(shards, **options)
    return compressed_layer.forward(x, functions, CSA)["out"].sin().sum()


def in_a_step(group: ProcessGroup, step: Any, lengths: list[int]) -> None:
    """Compiled, recomputed, and with gathered keys that are kept: bit for bit as without."""
    order = "zigzag" if step is layer else "contiguous"
    with ops.limits(None):
        shards = SequenceShards(lengths, group, order)
        x = (local_leaves if step is layer else compressed_leaves)(shards)
        expected = step(shards, x)
        wanted = gradients(x, expected)
        torch._dynamo.reset()
        losses = {
            "kept": step(shards, x, save_gathered=True),
            "recomputed": checkpoint(step, shards, x, use_reentrant=False),
            "compiled": torch.compile(step, fullgraph=True, backend="aot_eager")(shards, x),
        }
        for name, loss in losses.items():
            assert torch.equal(loss, expected), name
            same(gradients(x, loss), wanted)
        again = checkpoint(
            lambda *tensors: step(shards, dict(zip(x, tensors, strict=True))),
            *x.values(), use_reentrant=True,
        )  # fmt: skip
        again.backward()
        same({name: leaf.grad for name, leaf in x.items()}, wanted)


@pytest.mark.smoke
@NOT_WITH_2_7
@rank_counts(2, 3)
@pytest.mark.parametrize("step", [layer, compressed])
def test_compiled_recomputed_and_kept(step: Any, ranks: int) -> None:
    on_ranks(ranks, in_a_step, step, LENGTHS)


@nightly
@NOT_WITH_2_7
def test_ranks_with_different_numbers_of_parts() -> None:
    on_ranks(3, in_a_step, layer, [4, 1, 1])


def methods_recomputed(group: ProcessGroup) -> None:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = local_leaves(shards)
        for method in METHODS[1:]:
            expected = layer(shards, x, method)
            loss = checkpoint(layer, shards, x, method, use_reentrant=False)
            assert torch.equal(loss, expected), method
            same(gradients(x, loss), gradients(x, expected))


@pytest.mark.smoke
def test_other_methods_are_recomputed() -> None:
    on_ranks(2, methods_recomputed)


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
@NOT_WITH_2_7
def test_compile_refuses_a_rank_without_tokens() -> None:
    for text in on_ranks(3, compiled_for_a_rank_without_tokens):
        assert (
            "shards: expected tokens on every rank under torch.compile, got none on rank 1" in text
        )


def in_autocast(group: ProcessGroup, compiled: bool) -> None:
    """As with arguments in bfloat16, and gradients in the dtype of the leaves."""
    methods = METHODS[:2] if compiled else METHODS
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = local_leaves(shards, torch.float32)
        half = {name: leaf if name == "sink" else leaf.bfloat16() for name, leaf in x.items()}
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


COMPILED = pytest.param(True, marks=[nightly, NOT_WITH_2_7], id="compiled")


@pytest.mark.parametrize("compiled", [False, COMPILED])
def test_autocast(compiled: bool) -> None:
    on_ranks(2, in_autocast, compiled)


def in_autocast_of_one_rank(group: ProcessGroup) -> None:
    """Without a common dtype to travel in, all ranks take the tensors as they are."""
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        for dtype in (torch.float32, torch.bfloat16):
            x = local_leaves(shards, dtype)
            for method in METHODS:
                expected = layer(shards, x, method=method)
                here = torch.autocast("cpu", torch.float16, enabled=group.rank() == 1)
                with here, pytest.warns(UserWarning, match=r"autocast: expected the same on all"):
                    loss = layer(shards, x, method=method)
                assert torch.equal(loss, expected)
                same(gradients(x, loss), gradients(x, expected))


def test_autocast_on_one_rank() -> None:
    on_ranks(2, in_autocast_of_one_rank)


def compiled_at_once(group: ProcessGroup) -> None:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        torch._dynamo.reset()
        x = compressed_leaves(SequenceShards(LENGTHS, group))
        step = torch.compile(compressed, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match=r"call shards\.compressed\(4\) before the compiled"):
            step(shards, x)


@NOT_WITH_2_7
def test_compiled_code_wants_its_shards_of_compressed_keys_before() -> None:
    on_ranks(2, compiled_at_once)


def compressed_in_autocast(group: ProcessGroup) -> None:
    """As with arguments in bfloat16; sinks and the indexer's weights stay in float32."""
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = compressed_leaves(shards, torch.float32)
        keys = shards.compressed(CSA.ratio).local_tokens
        x["cmp_kv"] = torch.linspace(-1, 1, keys * DIM).reshape(keys, 1, DIM)
        x["key_index"] = torch.linspace(-1, 1, keys * INDEX_DIM).reshape(keys, 1, INDEX_DIM)
        keeps = ("sink", "weights")
        half = {name: leaf if name in keeps else leaf.bfloat16() for name, leaf in x.items()}
        expected = compressed_attention(shards, half)
        with torch.autocast("cpu", torch.bfloat16):
            actual = compressed_attention(shards, x)
        for out, y in zip(actual, expected, strict=True):
            assert out.dtype == y.dtype
            assert torch.equal(out, y)
        learned = "query", "ori_kv", "query_index", "weights", "sink"
        leaves = [x[name] for name in learned]
        found, wanted = (torch.autograd.grad(y[0].sum(), leaves) for y in (actual, expected))
        for name, d, y in zip(learned, found, wanted, strict=True):
            assert d.dtype == torch.float32
            assert torch.equal(d, y), name


def compressed_attention(
    shards: SequenceShards, x: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    indexer = x["query_index"], x["key_index"], x["weights"]
    indices, values = distributed.lightning_indexer(
        *(y.detach() for y in indexer), shards=shards, sparse_count=COUNT, cmp_ratio=CSA.ratio,
        return_values=True,
    )  # fmt: skip
    out = distributed.sparse_flash_mla_with_indexer_loss(
        x["query"], x["ori_kv"], x["cmp_kv"], indices, *indexer, shards=shards, scale_value=SCALE,
        sink=x["sink"], cmp_ratio=CSA.ratio, ori_win_left=LEFT,
    )  # fmt: skip
    return out, indices, values


def test_autocast_with_compressed_keys() -> None:
    on_ranks(2, compressed_in_autocast)


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
