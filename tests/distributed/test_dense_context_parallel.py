"""Dense attention with sequences over several ranks, by each method."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
import torch.distributed as dist
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from sparse_layer import relative_error
from support.processes import on_ranks, rank_counts
from torch import Tensor
from torch.distributed import ProcessGroup

HEADS, KEY_HEADS, DIM, VALUE_DIM = 12, 12, 16, 16
OF_QUERIES = ("out", "max", "sum", "d_query", "d_query_rope")
LENGTHS = [[32], [37], [5, 6, 29, 64], [0, 3, 0, 4, 11, 13, 0], [2], [1, 0, 1]]


def inputs(
    lengths: list[int], dtype: torch.dtype, key_heads: int = KEY_HEADS, value_dim: int = VALUE_DIM,
    rope_dim: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "query": (HEADS, DIM), "key": (key_heads, DIM), "value": (key_heads, value_dim),
        "d_out": (HEADS, value_dim),
    }  # fmt: skip
    if rope_dim:
        shapes |= {"query_rope": (HEADS, rope_dim), "key_rope": (key_heads, rope_dim)}
    return {
        name: torch.randn(sum(lengths), *shape, generator=generator).bfloat16().to(dtype)
        for name, shape in shapes.items()
    }


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


def compare(group: ProcessGroup, method: str, modes: list[dict[str, int]]) -> None:
    for lengths in LENGTHS:
        for dtype in (torch.float64, torch.float32):
            tokens = inputs(lengths, dtype)
            for order in ("zigzag", "contiguous"):
                shards = SequenceShards(lengths, group, order)
                for mode in modes:
                    expected = one_process(tokens, lengths, **mode)
                    layout = "BSND" if len(lengths) == 1 else "TND"
                    actual = of_ranks(tokens, shards, layout, method=method, **mode)
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


def compare_without_limits(group: ProcessGroup, method: str, modes: list[dict[str, int]]) -> None:
    with ops.limits(None):
        compare(group, method, modes)


CAUSAL = [{"sparse_mode": 3}]
ALL_MODES = [
    {}, {"sparse_mode": 2}, *CAUSAL, {"sparse_mode": 4, "pre_tokens": 5, "next_tokens": 0},
    {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 3},
]  # fmt: skip


@rank_counts(3, 2, 4)
@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_causal(method: str, ranks: int) -> None:
    on_ranks(ranks, compare_without_limits, method, CAUSAL)


@pytest.mark.parametrize(
    ("method", "modes"),
    [("allgather", ALL_MODES), ("ring", ALL_MODES[:2]), ("ulysses", ALL_MODES)],
    ids=["allgather", "ring", "ulysses"],
)
def test_modes(method: str, modes: list[dict[str, int]]) -> None:
    on_ranks(2, compare_without_limits, method, modes)


def grouped_heads(group: ProcessGroup, method: str) -> None:
    lengths = [5, 19, 8]
    with ops.limits(None):
        tokens = inputs(lengths, torch.float64, key_heads=4, value_dim=8)
        shards = SequenceShards(lengths, group)
        expected = one_process(tokens, lengths, sparse_mode=3)
        check(shards, of_ranks(tokens, shards, method=method, sparse_mode=3), expected, method)


@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_grouped_heads_and_smaller_values(method: str) -> None:
    on_ranks(4, grouped_heads, method)


def with_sinks(group: ProcessGroup, method: str, modes: list[dict[str, int]]) -> None:
    with ops.limits(None):
        for lengths in LENGTHS:
            for dtype in (torch.float64, torch.float32):
                # Beside scores of up to 10, of some weight and of nearly none.
                tokens = inputs(lengths, dtype, key_heads=HEADS, value_dim=8)
                tokens["sink"] = torch.linspace(-6, 6, HEADS, dtype=dtype)
                shards = SequenceShards(lengths, group)
                for mode in modes:
                    expected = one_process(tokens, lengths, **mode)
                    layout = "BSND" if len(lengths) == 1 else "TND"
                    actual = of_ranks(tokens, shards, layout, method=method, **mode)
                    assert expected["d_sink"].any()
                    check(shards, actual, expected, method)


@rank_counts(3, 1, 2)
@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_sinks_are_counted_once(method: str, ranks: int) -> None:
    on_ranks(ranks, with_sinks, method, ALL_MODES[:2] if method == "ring" else ALL_MODES[2:])


def with_ropes(group: ProcessGroup, method: str, modes: list[dict[str, int]]) -> None:
    with ops.limits(None):
        for number, lengths in enumerate(LENGTHS):
            for dtype in (torch.float64, torch.float32):
                tokens = inputs(lengths, dtype, value_dim=8, rope_dim=(8, 24)[number % 2])
                if number % 2:
                    tokens["sink"] = torch.linspace(-6, 6, HEADS, dtype=dtype)
                shards = SequenceShards(lengths, group)
                for mode in modes:
                    expected = one_process(tokens, lengths, **mode)
                    layout = "BSND" if len(lengths) == 1 else "TND"
                    actual = of_ranks(tokens, shards, layout, method=method, **mode)
                    assert expected["d_query_rope"].any()
                    assert expected["d_key_rope"].any()
                    check(shards, actual, expected, method)


@rank_counts(3, 1, 2)
@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_ropes(method: str, ranks: int) -> None:
    on_ranks(ranks, with_ropes, method, ALL_MODES[:2] if method == "ring" else ALL_MODES[2:])


def ropes_as_a_part_of_the_heads(group: ProcessGroup, method: str) -> None:
    """Under autocast, with few key heads, gathered keys saved: as concatenated heads without."""
    tokens = inputs([19, 6, 40], torch.float32, key_heads=4, rope_dim=8)
    shards = SequenceShards([19, 6, 40], group)
    local = {name: shards.shard(x) for name, x in tokens.items() if name != "d_out"}
    options: dict[str, Any] = {
        "num_heads": HEADS, "shards": shards, "method": method, "sparse_mode": 3,
        "save_gathered": method == "allgather",
    }  # fmt: skip
    heads = {
        name: torch.cat((local[name], local[f"{name}_rope"]), -1).bfloat16()
        for name in ("query", "key")
    }
    expected, *_ = distributed.flash_attention_score(
        **heads, value=local["value"].bfloat16(), **options
    )
    for x in local.values():
        x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out, *_ = distributed.flash_attention_score(**local, **options)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)
    out.float().square().sum().backward()
    assert all(x.grad.any() and x.grad.dtype == x.dtype for x in local.values())


@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_ropes_under_autocast(method: str) -> None:
    on_ranks(2, ropes_as_a_part_of_the_heads, method)


def wrong_ropes(group: ProcessGroup, method: str) -> list[str]:
    shards = SequenceShards([19], group)
    query = torch.randn(shards.local_tokens, HEADS, DIM)
    rope = query[..., :8]
    ropes: list[dict[str, Any]] = [
        {"query_rope": rope}, {"key_rope": rope}, {"query_rope": rope, "key_rope": query},
        {"query_rope": rope, "key_rope": rope[1:]}, {"query_rope": rope.half(), "key_rope": rope},
        # Only on the first rank.
        {} if group.rank() else {"query_rope": rope, "key_rope": rope},
    ]  # fmt: skip
    texts = []
    for options in ropes:
        with pytest.raises((TypeError, ValueError)) as caught:
            distributed.flash_attention_score(
                query, query, query, num_heads=HEADS, shards=shards, method=method,
                scale_value=1.0, **options,
            )  # fmt: skip
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_wrong_ropes(method: str) -> None:
    first, second = on_ranks(2, wrong_ropes, method)
    expected = [
        "key_rope: expected a tensor", "query_rope: expected a tensor",
        "key_rope: expected .*Dr = 8", "key_rope: expected the .* local tokens",
        "query_rope: expected dtype float32", "query_rope",
    ]  # fmt: skip
    for texts in (first, second):
        for text, pattern in zip(texts, expected, strict=True):
            assert re.search(pattern, text), text
            assert "\n" not in text


def wrong_sinks(group: ProcessGroup, method: str) -> list[str]:
    shards = SequenceShards([19], group)
    query = torch.randn(shards.local_tokens, HEADS, DIM)
    sinks: list[Any] = [
        torch.zeros(HEADS + 1), torch.zeros(1), torch.zeros(HEADS).long(), [0.0] * HEADS,
        # Another one on the second rank.
        None if group.rank() else torch.zeros(HEADS),
    ]  # fmt: skip
    texts = []
    for sink in sinks:
        with pytest.raises((TypeError, ValueError)) as caught:
            distributed.flash_attention_score(
                query, query, query, num_heads=HEADS, shards=shards, method=method, sink=sink
            )
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_wrong_sinks(method: str) -> None:
    first, second = on_ranks(2, wrong_sinks, method)
    expected = [
        r"shape \(12\), one score per query head, got \[13\]", r"shape \(12\), .* got \[1\]",
        r"dtype float32, got int64", r"a tensor of this rank's tokens, got list",
    ]  # fmt: skip
    for texts in (first, second):
        for text, pattern in zip(texts, expected, strict=False):
            assert re.search(rf"ascend::flash_attention_score: sink: expected {pattern}", text)
        assert "sink" in texts[-1]
        assert "\n" not in texts[-1]
    assert first[-1] == second[-1]


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


@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_a_query_whose_scores_are_minus_infinity(method: str) -> None:
    on_ranks(2, without_keys, method)


def bfloat16_errors(group: ProcessGroup) -> dict[str, tuple[float, float]]:
    lengths = [700, 324]
    half = inputs(lengths, torch.bfloat16)
    with ops.limits(None):
        shards = SequenceShards(lengths, group)
        double = {name: x.double() for name, x in half.items()}
        truth = one_process(double, lengths, sparse_mode=3)
        one = one_process(half, lengths, sparse_mode=3)
        ring = of_ranks(half, shards, method="ring", sparse_mode=3)
    return {
        name: (
            relative_error(shards.unshard(ring[name]), truth[name]),
            relative_error(one[name], truth[name]),
        )
        for name in ("out", "d_query", "d_key", "d_value")
    }


def test_ring_in_bfloat16_is_nearly_as_exact() -> None:
    for name, (ring, one) in on_ranks(4, bfloat16_errors)[0].items():
        print(f"{name}: {ring:.2e} in a ring of 4, {one:.2e} in one process")
        assert ring <= 1.7 * one, name
