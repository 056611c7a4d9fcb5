"""Calls of DeepSeek-V4's attention that are wrong on one rank are errors on all of them."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import distributed
from ascend_attn_ops.distributed import SequenceShards
from compressed_layer import COUNT, CSA, DIM, HEADS, SCALE, inputs
from support.processes import on_ranks
from torch import Tensor
from torch.distributed import ProcessGroup
from wrong_rank import WRONG_RANK, Case, assert_all_are_told, message, message_of_case, twice

LENGTHS = [9]


def compress(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> Any:
    return distributed.compress_keys(
        x["values"], x["logits"], x["bias"], **{"shards": shards, "overlap": True, **options}
    )


def indexer(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> Any:
    options = {"sparse_count": COUNT, "cmp_ratio": CSA.ratio, **options}
    return distributed.lightning_indexer(
        x["query_index"], x["key_index"], x["weights"], shards=shards, **options
    )


def attention(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> Any:
    options = {"scale_value": SCALE, "cmp_ratio": CSA.ratio, "sink": x["sink"], **options}
    return distributed.sparse_flash_mla(
        x["query"], x["ori_kv"], x["cmp_kv"], x["indices"], shards=shards, **options
    )


def with_loss(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> Any:
    trained = {"query_index", "key_index", "weights"}
    y = {name: z.requires_grad_() if name in trained else z for name, z in x.items()}
    options = {"scale_value": SCALE, "cmp_ratio": CSA.ratio, "sink": x["sink"], **options}
    return distributed.sparse_flash_mla_with_indexer_loss(
        y["query"], y["ori_kv"], y["cmp_kv"], y["indices"], y["query_index"], y["key_index"],
        y["weights"], shards=shards, **options,
    )  # fmt: skip


def with_target(x: dict[str, Tensor], shards: SequenceShards, **options: Any) -> Any:
    y = {"target": x["target"], "cmp_ratio": CSA.ratio, **options}
    return distributed.lightning_indexer_kl_loss(
        options.pop("query", None), None, x["query_index"], x["key_index"], x["weights"],
        x["indices"], shards=shards, **{k: z for k, z in y.items() if k != "query"},
    )  # fmt: skip


CASES: dict[str, Case] = {
    "keys of all ranks": (
        attention, {"cmp_kv": twice}, {},
        "ValueError: .*cmp_kv: expected the 1 local compressed keys of shards, .* got .2, 1, 16. ",
    ),
    "tokens of all ranks": (
        attention, {"ori_kv": twice}, {}, "ValueError: .*ori_kv: expected the 3 local tokens",
    ),
    "no compressed keys": (
        attention, {"cmp_kv": lambda _: None, "indices": lambda _: None}, {},
        "ValueError: .*cmp_sparse_indices: expected the same on all ranks",
    ),
    "window": (attention, {}, {"ori_win_left": -2}, "ValueError: .*ori_win_left: .*at least -1"),
    "other window": (attention, {}, {"ori_win_left": 3}, "ValueError: .*ori_win_left: .*the same"),
    "ratio": (attention, {}, {"cmp_ratio": 0}, "ValueError: .*cmp_ratio: expected at least 1"),
    "ratio of text": (attention, {}, {"cmp_ratio": "4"}, "TypeError: .*cmp_ratio: .* whole number"),
    "mode": (attention, {}, {"ori_mask_mode": 5}, "ValueError: .*ori_mask_mode: "),
    "sink": (attention, {"sink": lambda x: x[:-1]}, {}, "ValueError: .*sink: "),
    "no window's keys": (
        attention, {"ori_kv": lambda _: None}, {}, "TypeError: .*ori_kv: expected a tensor"
    ),
    "a key of later tokens": (
        attention, {"indices": lambda x: torch.full_like(x, 2)}, {},
        r"ValueError: .*cmp_sparse_indices: expected values in \[-1, 2\), got 2 at \(0, 0, 0\)",
    ),
    "values": (
        compress, {"values": twice}, {}, "ValueError: .*values: expected the 3 local tokens",
    ),
    "bias": (
        compress, {"bias": lambda x: x[:, :-1]}, {}, "ValueError: .*position_bias: expected shape",
    ),
    "other ratio": (
        compress, {"bias": lambda x: x[:-1]}, {}, "ValueError: .*position_bias: .* same on all",
    ),
    "overlap": (compress, {}, {"overlap": False}, "ValueError: .*overlap: expected the same"),
    "overlap of text": (compress, {}, {"overlap": "yes"}, "TypeError: .*overlap: expected a bool"),
    "layout": (compress, {}, {"layout": "BNSD"}, "ValueError: .*layout: expected 'TND' or 'BSND'"),
    "the indexer's keys": (
        indexer, {"key_index": twice}, {}, "ValueError: .*key: expected the 1 local compressed",
    ),
    "prefetch": (
        indexer, {}, {"prefetch": (torch.zeros(3, 1, DIM),)},
        "ValueError: .*prefetch: expected nothing with cmp_ratio above 1, got 1 tensors",
    ),
    "gradient of the values": (
        indexer, {"query_index": lambda x: x.clone().requires_grad_()}, {"return_values": True},
        "NotImplementedError: .*cmp_ratio: expected 1 where a gradient of the values",
    ),
    "factor": (
        with_loss, {}, {"indexer_loss_weight": torch.ones(2)},
        "ValueError: .*indexer_loss_weight: expected one element",
    ),
    "other factor": (
        with_loss, {}, {"indexer_loss_weight": 2.0}, "ValueError: .*factor: expected the same",
    ),
    "factor of text": (
        with_loss, {}, {"indexer_loss_weight": "2"}, "TypeError: .*indexer_loss_weight: .*number",
    ),
    "on_loss": (with_loss, {}, {"on_loss": print}, "ValueError: .*on_loss: expected the same"),
    "head size": (
        with_loss, {"query_index": lambda x: x[..., :-1]}, {}, "ValueError: .*(query|key)_index: ",
    ),
    "a target and an attention": (
        with_target, {}, {"query": torch.zeros(3, HEADS, DIM)},
        "ValueError: .*query: expected None beside a target",
    ),
    "target": (with_target, {"target": twice}, {}, "ValueError: .*target: expected the 3 local"),
    "slots of the target": (
        with_target, {"target": lambda x: x[..., :-1]}, {},
        "ValueError: .*attn_softmax_l1_norm: expected shape",
    ),
    "ratio beside a target": (
        with_target, {}, {"cmp_ratio": 2}, "ValueError: .*cmp_ratio: expected the same on all",
    ),
    "normalized target": (
        with_target, {}, {"normalize_target": True}, "ValueError: .*normalize_target: .* same on",
    ),
    "no target": (
        with_target, {}, {"target": None}, "ValueError: .*query: expected the attention's, or a",
    ),
    "no indices": (
        with_loss, {"indices": lambda _: None}, {},
        "TypeError: .*cmp_sparse_indices: expected a tensor, got NoneType",
    ),
}  # fmt: skip


def wrong_call(group: ProcessGroup, name: str) -> str:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group, "contiguous")
        x = {key: shards.shard(y) for key, y in inputs(LENGTHS, CSA, torch.float32).items()}
        x["bias"] = torch.zeros(CSA.ratio, 2 * DIM)
        x["sink"] = torch.zeros(HEADS)
        keys = shards.compressed(CSA.ratio).local_tokens
        x["cmp_kv"] = torch.ones(keys, 1, DIM)
        x["key_index"] = torch.ones(keys, 1, x["query_index"].shape[-1])
        x["indices"] = torch.zeros(shards.local_tokens, 1, COUNT, dtype=torch.int32)
        x["target"] = torch.full((shards.local_tokens, 1, COUNT), 0.1)
        return message_of_case(group, CASES[name], x, shards)


@pytest.mark.parametrize("name", list(CASES))
def test_wrong_on_one_rank(name: str) -> None:
    assert_all_are_told(on_ranks(3, wrong_call, name), CASES[name][3])


def modified_before_the_backward(group: ProcessGroup) -> str:
    with ops.limits(None):
        shards = SequenceShards(LENGTHS, group, "contiguous")
        tokens = inputs(LENGTHS, CSA, torch.float32)
        query, ori_kv = (
            shards.shard(tokens[name]).requires_grad_() for name in ("query", "ori_kv")
        )
        out, _ = distributed.sparse_flash_mla(query, ori_kv, shards=shards, scale_value=SCALE)
        if group.rank() == WRONG_RANK:
            with torch.no_grad():
                query.add_(1)
        return message(lambda: out.sum().backward())


def test_wrong_in_the_backward_of_one_rank() -> None:
    messages = on_ranks(3, modified_before_the_backward)
    assert_all_are_told(messages, "RuntimeError: one of the variables needed for gradient")
    assert "(on rank 2)" in messages[0]
