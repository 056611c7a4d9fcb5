"""A call that is wrong on one rank is an error on all of them, before anything travels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import _C, distributed
from ascend_attn_ops.distributed import SequenceShards
from sparse_layer import SCALE, Sizes, inputs, of_ranks
from support.processes import on_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from wrong_rank import WRONG_RANK, Case, assert_all_are_told, message, message_of_case, twice

np = pytest.importorskip("numpy", reason="numpy is not installed")

SIZES = Sizes()
# The second of three ranks has no tokens.
LENGTHS = [2]


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
        ([[4], [2**70], [4]], r"ValueError: SequenceShards: lengths: expected the same on all"),
    ],
    ids=["differ", "negative", "type", "none", "huge"],
)  # fmt: skip
def test_lengths(given: list[Any], expected: str) -> None:
    messages = on_ranks(3, wrong_lengths, given)
    assert len(set(messages)) == 1
    assert re.match(expected, messages[0]), messages[0]


def lengths_of_iterators(group: ProcessGroup) -> None:
    expected = SequenceShards([6, 9], group).parts()
    for lengths in ((n for n in [6, 9]), iter([6, 9]), {6: 0, 9: 0}, range(6, 10, 3)):
        assert SequenceShards(lengths, group).parts() == expected


def test_lengths_may_be_an_iterator() -> None:
    on_ranks(2, lengths_of_iterators)


def broken_lengths(group: ProcessGroup) -> str:
    def lengths() -> Iterator[int]:
        yield 4
        if group.rank() == WRONG_RANK:
            raise LookupError("no such sequence")

    with pytest.raises(LookupError) as caught:
        SequenceShards(lengths(), group)
    return str(caught.value)


def test_an_iterator_that_raises() -> None:
    assert on_ranks(3, broken_lengths) == ["no such sequence (on rank 2)"] * 3


def test_order() -> None:
    for text in on_ranks(3, wrong_order):
        assert "order: expected the same on all ranks, got 'zigzag' on rank 0" in text


def sparse_attention(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> Any:
    return distributed.sparse_flash_attention(
        x["query"], x["latent"], options.pop("value", x["latent"]), x["indices"],
        **{"scale_value": SCALE, "query_rope": x["query_rope"], "key_rope": x["key_rope"],
           "shards": shards, **options},
    )  # fmt: skip


def indexer(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> Any:
    options = {"sparse_count": SIZES.count, **options}
    return distributed.lightning_indexer(
        x["query_index"], x["key_index"], x["weights"], shards=shards, **options
    )


def loss(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> Any:
    return distributed.lightning_indexer_kl_loss(
        x["query"], x["latent"], x["query_index"], x["key_index"], x["weights"], x["indices"],
        x["max"], x["max"], query_rope=x["query_rope"], key_rope=x["key_rope"],
        **{"scale_value": SCALE, "shards": shards, **options},
    )  # fmt: skip


def dense(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> Any:
    heads = options.pop("num_heads", SIZES.heads)
    return distributed.flash_attention_score(
        x["query"], x["latent"], x["latent"], num_heads=heads, shards=shards, **options
    )


def freed(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


class Unspeakable(Exception):
    """Cannot be made from its message, nor pickled."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.callback = lambda: code


class Raises:
    """An option whose repr raises."""

    def __repr__(self) -> str:
        raise Unspeakable(3, "no text")


CASES: dict[str, Case] = {
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
    "no prefetch": (indexer, {}, {"prefetch": None}, "ValueError: .*prefetch: .* got None"),
    "prefetch of a tensor": (
        indexer, {}, {"prefetch": torch.zeros(2, 1)}, "ValueError: .*prefetch: expected the key"
    ),
    "no heads": (dense, {}, {"num_heads": None}, "TypeError: .*num_heads: .* got None"),
    "no heads in ulysses": (
        dense, {}, {"num_heads": None, "method": "ulysses"}, "TypeError: .*num_heads: .* got None"
    ),
    "no query": (dense, {"query": lambda _: None}, {}, "ValueError: .*query: expected a tensor"),
    "no depth": (dense, {"query": lambda x: x[..., :0]}, {}, "ValueError: .*D = 0"),
    "no axes": (dense, {"query": lambda x: x[:, 0, 0]}, {}, "ValueError: .*query: expected rank 4"),
    "sparse": (dense, {"query": Tensor.to_sparse}, {}, "NotImplementedError: .*query: .* dense"),
    "freed": (dense, {"query": freed}, {}, "ValueError: .*query: expected a storage that holds"),
    "index beyond the keys": (
        sparse_attention, {"indices": lambda x: torch.full_like(x, 1)}, {},
        r"ValueError: .*sparse_indices: expected values in \[-1, 1\), got 1 at \(0, 0, 0\)",
    ),
    "index below -1": (
        loss, {"indices": lambda x: torch.full_like(x, -2)}, {},
        r"ValueError: .*sparse_indices: expected values in \[-1, 1\), got -2",
    ),
    "statistics that no row has": (
        loss, {"max": lambda x: torch.full_like(x, 0.5)}, {},
        "ValueError: .*_kl_loss: softmax_sum: expected sums of .*, got 0.5",
    ),
    "number of another type": (
        sparse_attention, {}, {"scale_value": np.float64(SCALE)}, "ValueError: .*scale_value: .* sa"
    ),
    "number whose memory was freed": (
        sparse_attention, {}, {"scale_value": freed(torch.tensor(SCALE))},
        "ValueError: .*scale_value: expected a storage that holds every element",
    ),
    "number without memory": (
        sparse_attention, {}, {"sparse_mode": torch._efficientzerotensor(1, dtype=torch.int64)},
        "ValueError: .*sparse_mode: expected the same on all ranks, got 3 on rank 0",
    ),
    "kept keys": (
        sparse_attention, {}, {"save_gathered": True}, "ValueError: .*save_gathered: .* the same on"
    ),
    "unknown argument": (indexer, {}, {"sparse_counts": 3}, "TypeError: .*unexpected keyword"),
    "strange error": (
        loss, {}, {"normalizer": Raises()}, r"RuntimeError: Unspeakable: no text \(3\)",
    ),
}  # fmt: skip


def wrong_call(group: ProcessGroup, name: str) -> str:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = {k: shards.shard(v) for k, v in inputs(LENGTHS, torch.float32, SIZES).items()}
        x["indices"] = torch.zeros(shards.local_tokens, 1, SIZES.count, dtype=torch.int32)
        x["max"] = torch.ones(1, shards.local_tokens, SIZES.heads)
        return message_of_case(group, CASES[name], x, shards)


@pytest.mark.parametrize("name", list(CASES))
def test_wrong_on_one_rank(name: str) -> None:
    assert_all_are_told(on_ranks(3, wrong_call, name), CASES[name][3])


def other_matrix_products(group: ProcessGroup) -> str:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = {k: shards.shard(v) for k, v in inputs(LENGTHS, torch.float32, SIZES).items()}
        chosen = "float32" if group.rank() == WRONG_RANK else "bfloat16"
        with mock.patch.object(_C, "matrix_products", return_value=chosen):
            return message(lambda: indexer(x, shards))


def test_ranks_choose_the_same_matrix_products() -> None:
    for text in on_ranks(3, other_matrix_products):
        assert re.match(
            r"ValueError: .*: matrix products \(set ASCEND_ATTN_OPS_CPU_CAPABILITY\): expected the "
            "same on all ranks, got 'bfloat16' on rank 0 and 'float32' on rank 2",
            text,
        )


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


def unshard_with_a_gradient_on_one_rank(group: ProcessGroup) -> str:
    shards = SequenceShards([6], group)
    x = torch.zeros(2, 2, requires_grad=group.rank() == WRONG_RANK)
    return message(lambda: shards.unshard(x))


def test_unshard_with_a_gradient_on_one_rank() -> None:
    for text in on_ranks(3, unshard_with_a_gradient_on_one_rank):
        assert "gradient: expected the same on all ranks, got False on rank 0" in text


def unshard_a_fake_tensor(group: ProcessGroup) -> str:
    shards = SequenceShards([6], group)
    with FakeTensorMode() if group.rank() == WRONG_RANK else nullcontext():
        x = torch.zeros(2, 2)
    return message(lambda: shards.unshard(x))


def test_unshard_a_fake_tensor() -> None:
    for text in on_ranks(3, unshard_a_fake_tensor):
        assert "x: expected a tensor of this rank's tokens, got FakeTensor (on rank 2)" in text


def inference_tensor_on_one_rank(group: ProcessGroup) -> str:
    with ops.limits(None):
        shards = SequenceShards([9], group)
        tokens = inputs([9], torch.float32, SIZES)
        x = {k: shards.shard(v).requires_grad_() for k, v in tokens.items()}
        x["indices"] = torch.zeros(shards.local_tokens, 1, SIZES.count, dtype=torch.int32)
        if group.rank() == WRONG_RANK:
            x["indices"] = inference(x["indices"])
        with torch.no_grad():
            sparse_attention(x, shards)
        return message(lambda: sparse_attention(x, shards))


def test_inference_tensor_on_one_rank() -> None:
    messages = on_ranks(3, inference_tensor_on_one_rank)
    assert len(set(messages)) == 1
    assert "sparse_indices: expected no inference tensor where gradients are" in messages[0]


def wrong_without_tokens(group: ProcessGroup) -> str:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group)
        x = {k: shards.shard(v) for k, v in inputs(LENGTHS, torch.float32, SIZES).items()}
        if shards.local_tokens == 0:
            x["query_index"] = x["query_index"][:, 0]
        return message(lambda: indexer(x, shards))


def test_wrong_on_a_rank_without_tokens() -> None:
    assert len(set(on_ranks(3, wrong_without_tokens))) == 1


def unshard_on_a_freed_axis(group: ProcessGroup) -> str:
    shards = SequenceShards([6], group)
    axis = torch.tensor(0)
    if group.rank() == 1:
        axis.untyped_storage().resize_(0)
    return message(lambda: shards.unshard(torch.zeros(3, 2), axis))  # type: ignore[arg-type]


def test_unshard_on_an_axis_whose_memory_was_freed() -> None:
    for text in on_ranks(2, unshard_on_a_freed_axis):
        assert "dim: expected a whole number, got a tensor of int64 [] " in text


def test_unshard() -> None:
    for text in on_ranks(3, wrong_unshard):
        assert "x: expected the 2 tokens of this rank on axis 0, got shape (3, 2)" in text


def modified_before_the_backward(group: ProcessGroup, name: str) -> str:
    with ops.limits(None):
        shards = SequenceShards([9], group)
        tokens = inputs([9], torch.float32, SIZES)
        x = {k: shards.shard(v).requires_grad_() for k, v in tokens.items()}
        x["indices"] = torch.zeros(shards.local_tokens, 1, SIZES.count, dtype=torch.int32)
        changed = x["query"]
        if name == "indexer":
            changed = x["query_index"]
            out = indexer(x, shards, return_values=True)[1]
        elif name == "sparse":
            out = sparse_attention(x, shards)[0]
        else:
            out = dense(x, shards, method=name)[0]
        if group.rank() == WRONG_RANK:
            with torch.no_grad():
                changed.add_(1)
        return message(lambda: out.sum().backward())


@pytest.mark.parametrize("name", ["sparse", "indexer", "allgather", "ring"])
def test_wrong_in_the_backward_of_one_rank(name: str) -> None:
    messages = on_ranks(3, modified_before_the_backward, name)
    assert_all_are_told(messages, "RuntimeError: one of the variables needed for gradient")
    assert "(on rank 2)" in messages[0]


def unchecked(group: ProcessGroup) -> None:
    with ops.limits(None):
        tokens = inputs([9, 4], torch.float64, SIZES)
        checked = SequenceShards([9, 4], group)
        trusting = SequenceShards([9, 4], group, check_calls=False)
        expected, actual = (of_ranks(tokens, x, SIZES) for x in (checked, trusting))
        for name, x in expected.items():
            assert torch.equal(actual[name], x), name
        # A call that is wrong on all ranks is still an error on each.
        assert "local tokens" in message(lambda: indexer(tokens, trusting))


def test_calls_can_go_unchecked() -> None:
    on_ranks(2, unchecked)
