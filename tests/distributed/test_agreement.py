"""A call that is wrong on one rank is an error on all of them, before anything travels."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from sparse_layer import SCALE, Sizes, inputs, of_ranks
from support.processes import on_ranks
from torch import Tensor
from torch.distributed import ProcessGroup

SIZES = Sizes()
# Of three ranks the second has no tokens.
LENGTHS = [2]
WRONG_RANK = 2


def message(call: Callable[[], object]) -> str:
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


def wrong_lengths(group: ProcessGroup, given: list[Any]) -> str:
    lengths = given[group.rank()]
    return message(lambda: SequenceShards(lengths, group))


def wrong_order(group: ProcessGroup) -> str:
    order = "contiguous" if group.rank() == WRONG_RANK else "zigzag"
    return message(lambda: SequenceShards([4], group, order))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[4, 3], [4, 3], [4, 2]],
         r"ValueError: SequenceShards: lengths: expected the same on all ranks, "
         r"got \(4, 3\) on rank 0 and \(4, 2\) on rank 2"),
        ([[4], [-1], [4]],
         r"ValueError: SequenceShards: lengths: expected no negative length, "
         r"got \[-1\] \(on rank 1\)"),
        ([[4], [4.0], [4]], r"TypeError: SequenceShards: lengths: expected a list of integers"),
        ([[4], None, [4]], r"TypeError: SequenceShards: lengths: .* got None \(on rank 1\)"),
    ],
    ids=["differ", "negative", "type", "none"],
)  # fmt: skip
def test_lengths(given: list[Any], expected: str) -> None:
    messages = on_ranks(3, wrong_lengths, given)
    assert len(set(messages)) == 1
    assert re.match(expected, messages[0]), messages[0]


def test_order() -> None:
    for text in on_ranks(3, wrong_order):
        assert "order: expected the same on all ranks, got zigzag on rank 0" in text


def sparse_attention(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> object:
    return distributed.sparse_flash_attention(
        x["query"], x["latent"], options.pop("value", x["latent"]), x["indices"],
        **{"scale_value": SCALE, "query_rope": x["query_rope"], "key_rope": x["key_rope"],
           "shards": shards, **options},
    )  # fmt: skip


def indexer(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> object:
    options = {"sparse_count": SIZES.count, **options}
    return distributed.lightning_indexer(
        x["query_index"], x["key_index"], x["weights"], shards=shards, **options
    )


def loss(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> object:
    return distributed.lightning_indexer_kl_loss(
        x["query"], x["latent"], x["query_index"], x["key_index"], x["weights"], x["indices"],
        x["max"], x["max"], query_rope=x["query_rope"], key_rope=x["key_rope"],
        **{"scale_value": SCALE, "shards": shards, **options},
    )  # fmt: skip


def dense(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> object:
    heads = options.pop("num_heads", SIZES.heads)
    return distributed.flash_attention_score(
        x["query"], x["latent"], x["latent"], num_heads=heads, shards=shards, **options
    )


def twice(x: Tensor) -> Tensor:
    return torch.cat((x, x))


# Function, what is wrong on one rank (tensors, options), and what all ranks are told.
CASES: dict[str, tuple[Any, dict[str, Callable[[Tensor], Tensor]], dict[str, Any], str]] = {
    "all tokens": (sparse_attention, {"latent": twice}, {}, "ValueError: .*key: expected the 1 lo"),
    "device": (indexer, {"key_index": lambda x: x.to("meta")}, {}, "ValueError: .*key: .*device"),
    "group's device": (
        indexer, dict.fromkeys(("query_index", "key_index", "weights"), lambda x: x.to("meta")), {},
        r"ValueError: .*query: expected device cpu or cuda \(the group's\), got meta",
    ),
    "dtype": (sparse_attention, {"key_rope": Tensor.double}, {}, "TypeError: .*key_rope: .*dtype"),
    "head size": (loss, {"key_index": lambda x: x[..., :8]}, {}, "ValueError: .*key_index: "),
    "all ranks but one": (indexer, {}, {"sparse_count": 3}, "ValueError: .*sparse_count: .* same"),
    "layout": (sparse_attention, {}, {"layout": "BSH"}, "ValueError: .*layout: expected 'TND' or"),
    "reduction": (loss, {}, {"reduction": "max"}, "ValueError: .*reduction: expected 'sum'"),
    "normalizer": (loss, {}, {"normalizer": 3.0}, "ValueError: .*normalizer: .* same on all"),
    "weight": (
        loss, {}, {"weight": torch.ones(7)}, "ValueError: .*weight: expected the 1 local tokens"
    ),
    "gradient": (
        sparse_attention, {"latent": lambda x: x.clone().requires_grad_()}, {},
        "ValueError: .*gradient: expected the same on all ranks",
    ),
    "method": (dense, {}, {"method": "star"}, "ValueError: .*method: expected 'allgather', 'ring'"),
    "heads": (dense, {}, {"method": "ulysses"}, "ValueError: .*number of heads that the 3 ranks"),
    "mode": (dense, {}, {"sparse_mode": 5}, "NotImplementedError: .*sparse_mode: expected one of"),
    "not a tensor": (
        sparse_attention, {}, {"query_rope": 3}, "TypeError: .*query_rope: .* got int"
    ),
    "prefetch": (
        indexer, {}, {"prefetch": (torch.zeros(1),) * 3}, "ValueError: .*prefetch: expected the key"
    ),
}  # fmt: skip


def wrong_call(group: ProcessGroup, name: str) -> str:
    function, changes, options, _ = CASES[name]
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = {k: shards.shard(v) for k, v in inputs(LENGTHS, torch.float32, SIZES).items()}
        x["indices"] = torch.zeros(shards.local_tokens, 1, SIZES.count, dtype=torch.int32)
        x["max"] = torch.ones(1, shards.local_tokens, SIZES.heads)
        # What goes well before makes no difference.
        function(x, shards)
        if group.rank() == WRONG_RANK:
            wrong = {**x, **{key: change(x[key]) for key, change in changes.items()}}
            text = message(lambda: function(wrong, shards, **options))
        else:
            text = message(lambda: function(x, shards))
        # And the ranks are still in step.
        function(x, shards)
    return text


@pytest.mark.parametrize("name", list(CASES))
def test_wrong_on_one_rank(name: str) -> None:
    messages = on_ranks(3, wrong_call, name)
    assert len(set(messages)) == 1
    assert re.match(CASES[name][3], messages[0]), messages[0]


def breaks_a_limit(group: ProcessGroup) -> str:
    shards = SequenceShards(LENGTHS, group)
    x = {k: shards.shard(v) for k, v in inputs(LENGTHS, torch.bfloat16, SIZES).items()}
    return message(lambda: indexer(x, shards))


def test_device_limits_hold_on_ranks_without_tokens() -> None:
    messages = on_ranks(3, breaks_a_limit)
    assert len(set(messages)) == 1
    assert "query: expected Didx" in messages[0]


def wrong_unshard(group: ProcessGroup) -> str:
    shards = SequenceShards([6], group)
    return message(lambda: shards.unshard(torch.zeros(3 - (group.rank() == 0), 2)))


def test_unshard() -> None:
    for text in on_ranks(3, wrong_unshard):
        assert "x: expected the 2 tokens of this rank on axis 0, got shape (3, 2)" in text


def unchecked(group: ProcessGroup) -> None:
    with ops.limits(None):
        tokens = inputs([9, 4], torch.float64, SIZES)
        checked = SequenceShards([9, 4], group)
        trusting = SequenceShards([9, 4], group, check_calls=False)
        expected, actual = (of_ranks(tokens, x, SIZES) for x in (checked, trusting))
        for name, x in expected.items():
            assert torch.equal(actual[name], x), name
        # What is wrong on all ranks is still an error on each.
        assert "local tokens" in message(lambda: indexer(tokens, trusting))


def test_calls_can_go_unchecked() -> None:
    on_ranks(2, unchecked)
