"""Dense attention with sequences over several ranks, by each method."""

from __future__ import annotations

from itertools import accumulate, product
from typing import Any

import ascend_attn_ops as ops
import pytest
import sparse_layer
import torch
import torch.distributed as dist
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from sparse_layer import drawn, relative_error
from support.processes import on_ranks, rank_counts
from torch import Tensor
from torch.distributed import ProcessGroup

HEADS, DIM = 12, 16
OF_QUERIES = ("out", "max", "sum", "d_query", "d_query_rope")
LENGTHS = [[32], [37], [5, 6, 29, 64], [0, 3, 0, 4, 11, 13, 0], [2], [1, 0, 1]]


def inputs(
    lengths: list[int], dtype: torch.dtype, key_heads: int = HEADS, value_dim: int = DIM,
    rope_dim: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    shapes = {
        "query": (HEADS, DIM), "key": (key_heads, DIM), "value": (key_heads, value_dim),
        "d_out": (HEADS, value_dim),
    }  # fmt: skip
    if rope_dim:
        shapes |= {"query_rope": (HEADS, rope_dim), "key_rope": (key_heads, rope_dim)}
    return drawn(lengths, dtype, shapes)


def run(tokens: dict[str, Tensor], call: Any, layout: str = "TND") -> dict[str, Tensor]:
    leaves = {
        name: x.detach().clone().requires_grad_() for name, x in tokens.items() if name != "d_out"
    }
    batch = {
        name: x.unsqueeze(0) if layout == "BSND" and name != "sink" else x
        for name, x in leaves.items()
    }
    out, softmax_max, softmax_sum = call(**batch, num_heads=HEADS, layout=layout)
    out.backward(tokens["d_out"].reshape(out.shape))
    results = {"out": out, "max": softmax_max, "sum": softmax_sum}
    if layout == "BSND":
        results["out"] = out.squeeze(0)
        results |= {name: results[name].squeeze(0).transpose(0, 1) for name in ("max", "sum")}
    results |= {f"d_{name}": leaf.grad for name, leaf in leaves.items()}
    return {name: x.detach() for name, x in results.items()}


def one_process(tokens: dict[str, Tensor], lengths: list[int], **options: Any) -> dict[str, Tensor]:
    ends = list(accumulate(lengths))

    def call(*args: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
        return ops.flash_attention_score(
            *args, **keywords, **options,
            actual_seq_lengths_query=ends, actual_seq_lengths_key=ends,
        )  # fmt: skip

    results = run(tokens, call)
    for name in ("max", "sum"):
        # The order of the device: sequence after sequence, heads first.
        pieces = results[name].split(lengths)
        heads = [x.reshape(HEADS, len(x), 8).transpose(0, 1) for x in pieces]
        results[name] = torch.cat(heads)
    return results


def of_ranks(
    tokens: dict[str, Tensor], shards: SequenceShards, layout: str = "TND", **options: Any
) -> dict[str, Tensor]:
    local = {name: x if name == "sink" else shards.shard(x) for name, x in tokens.items()}

    def call(*args: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
        return distributed.flash_attention_score(*args, **keywords, **options, shards=shards)

    results = run(local, call, layout)
    if "d_sink" in results:
        # Every rank has the gradient of its tokens, as of other parameters.
        dist.all_reduce(results["d_sink"], group=shards.group)
    return results


def tokens_of(number: int, dtype: torch.dtype, feature: str) -> dict[str, Tensor]:
    odd = number % 2
    sizes = {} if feature == "plain" else {"value_dim": 8}
    if feature == "ropes":
        sizes["rope_dim"] = (8, 24)[odd]
    tokens = inputs(LENGTHS[number], dtype, **sizes)
    if feature == "sinks" or (feature == "ropes" and odd):
        # Beside scores of up to 10, of some weight and of nearly none.
        tokens["sink"] = torch.linspace(-6, 6, HEADS, dtype=dtype)
    return tokens


def compare(group: ProcessGroup, method: str, feature: str) -> None:
    modes = MODES[:3] if method == "ring" else MODES if feature == "plain" else MODES[2:]
    orders = ("zigzag", "contiguous") if feature == "plain" else ("zigzag",)
    dtypes = (torch.float64, torch.float32)
    cases = product(enumerate(LENGTHS), dtypes, orders, modes)
    with ops.limits(None):
        for (number, lengths), dtype, order, mode in cases:
            tokens = tokens_of(number, dtype, feature)
            shards = SequenceShards(lengths, group, order)
            expected = one_process(tokens, lengths, **mode)
            layout = "BSND" if len(lengths) == 1 else "TND"
            actual = of_ranks(tokens, shards, layout, method=method, **mode)
            for name in {"d_sink", "d_query_rope", "d_key_rope"} & expected.keys():
                assert expected[name].any()
            check(shards, actual, expected, method)


def check(
    shards: SequenceShards, actual: dict[str, Tensor], expected: dict[str, Tensor], method: str
) -> None:
    tolerance = 1e-14 if expected["out"].dtype == torch.float64 else 1e-6
    for name, whole in expected.items():
        if name == "d_sink":
            assert relative_error(actual[name], whole) <= tolerance, name
        elif method == "ulysses" or (method == "allgather" and name in OF_QUERIES):
            assert torch.equal(actual[name], shards.shard(whole)), name
        else:
            assert relative_error(shards.unshard(actual[name]), whole) <= tolerance, name


MODES = [
    {}, {"sparse_mode": 2}, {"sparse_mode": 3},
    {"sparse_mode": 4, "pre_tokens": 5, "next_tokens": 0},
    {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 3},
]  # fmt: skip
each_method = pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])


@rank_counts(3, 1, 2, 4)
@each_method
@pytest.mark.parametrize("feature", ["plain", "sinks", "ropes"])
def test_results_are_those_of_one_process(feature: str, method: str, ranks: int) -> None:
    on_ranks(ranks, compare, method, feature)


def grouped_heads(group: ProcessGroup, method: str) -> None:
    lengths = [5, 19, 8]
    with ops.limits(None):
        tokens = inputs(lengths, torch.float64, key_heads=4, value_dim=8, rope_dim=8)
        shards = SequenceShards(lengths, group)
        expected = one_process(tokens, lengths, sparse_mode=3)
        check(shards, of_ranks(tokens, shards, method=method, sparse_mode=3), expected, method)


@each_method
def test_grouped_heads_and_smaller_values(method: str) -> None:
    on_ranks(4, grouped_heads, method)


def without_keys(group: ProcessGroup, method: str) -> None:
    lengths = [5, 19, 8]
    with ops.limits(None):
        for dtype in (torch.float64, torch.float32):
            tokens = inputs(lengths, dtype)
            # Every score of one query is -inf: a row without keys, wherever the keys are.
            tokens["query"][11, :, 0] = -torch.inf
            tokens["key"][:, :, 0] = 1
            shards = SequenceShards(lengths, group)
            expected = one_process(tokens, lengths, sparse_mode=3)
            actual = of_ranks(tokens, shards, method=method, sparse_mode=3)
            # d_key is NaN where a weight of 0 multiplies the query, which depends on the parts.
            del expected["d_key"]
            for name, whole in expected.items():
                torch.testing.assert_close(shards.unshard(actual[name]), whole, equal_nan=True)


@each_method
def test_a_query_whose_scores_are_minus_infinity(method: str) -> None:
    on_ranks(2, without_keys, method)


def bfloat16_errors(group: ProcessGroup) -> sparse_layer.Errors:
    lengths = [700, 324]
    half = inputs(lengths, torch.bfloat16)
    with ops.limits(None):
        shards = SequenceShards(lengths, group)
        double = {name: x.double() for name, x in half.items()}
        truth, one = (one_process(x, lengths, sparse_mode=3) for x in (double, half))
        ring = of_ranks(half, shards, method="ring", sparse_mode=3)
    return sparse_layer.errors(shards, ("out", "d_query", "d_key", "d_value"), ring, one, truth)


def test_ring_in_bfloat16_is_nearly_as_exact() -> None:
    sparse_layer.assert_nearly_as_exact(on_ranks(4, bfloat16_errors)[0], 1.7)
