"""Tensors without memory, and sizes whose product overflows 64 bits, are errors without cost."""

from __future__ import annotations

import itertools
import re

import ascend_attn_ops
import pytest
import torch
from support.samples import OPERATORS, Operator
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")


def tensor_arguments(operator: Operator) -> dict[str, int]:
    """Each tensor that some case has, and the first case that has it."""
    found: dict[str, int] = {}
    for index, recipe in enumerate(operator.recipes):
        for name, x in recipe.make(torch.bfloat16).tensors.items():
            if x.numel():
                found.setdefault(name, index)
    return found


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["freed", "too short"])
@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_memory_that_was_freed(operator: Operator, share: float) -> None:
    for name, case in tensor_arguments(operator).items():
        sample = operator.recipes[case].make(torch.bfloat16)
        without = sample.tensors[name].clone()
        storage = without.untyped_storage()
        storage.resize_(int(share * storage.nbytes()))
        message = rf"^ascend::{operator.name}: {re.escape(name)}: .*holds every element, got one of"
        with pytest.raises(ValueError, match=message):
            sample.replace(**{name: without}).call(torch.ops.ascend)


@pytest.mark.parametrize("argument", ["pse_shift", "drop_mask"])
def test_more_pairs_than_an_integer_counts(argument: str) -> None:
    key = torch.randn(1, 1, 1).expand(2**62, 1, 1)
    tensors: dict[str, dict[str, object]] = {
        "pse_shift": {"pse_shift": torch.empty(0)},
        "drop_mask": {"drop_mask": torch.empty(0, dtype=torch.uint8), "keep_prob": 0.5},
    }
    with pytest.raises(ValueError, match=f"^ascend::flash_attention_score: {argument}: expected"):
        torch.ops.ascend.flash_attention_score(
            torch.randn(4, 1, 1), key, key, num_heads=1, layout="TND", scale_value=1.0,
            actual_seq_lengths_query=[4], actual_seq_lengths_key=[2**62], **tensors[argument],
        )  # fmt: skip


def test_more_scores_than_an_integer_counts() -> None:
    x = torch.empty(2**20, 2**4, 2**20, 1, device="meta")
    mask = torch.empty(0, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match=r"drop_mask: expected one bit per score"):
        torch.ops.ascend.flash_attention_score(
            x, x, x, num_heads=2**4, layout="BNSD", scale_value=1.0, drop_mask=mask, keep_prob=0.5
        )


@pytest.mark.parametrize("block_size", [7, 8, 2**31, 2**62, 2**63 - 7, 2**63 - 1])
def test_blocks_larger_than_all_keys(block_size: int) -> None:
    query, key = torch.randn(1, 3, 2, 8), torch.randn(1, 7, 1, 8)
    indices = torch.zeros(1, 3, 1, 4, dtype=torch.int32)
    options = {"scale_value": 1.0, "sparse_mode": 0}
    actual = ascend_attn_ops.sparse_flash_attention(
        query, key, key, indices, sparse_block_size=block_size, **options
    )
    every = torch.arange(7, dtype=torch.int32).expand(1, 3, 1, 7).contiguous()
    torch.testing.assert_close(
        actual, ascend_attn_ops.sparse_flash_attention(query, key, key, every, **options)
    )


def test_positions_that_need_64_bits() -> None:
    """The keys are zeros, whose pages nobody writes to."""
    block = 2**20
    key = torch.zeros(1, 2**31 + block, 1, 1, dtype=torch.float16)
    key[0, -block:] = 1
    out, _, softmax_sum = ascend_attn_ops.sparse_flash_attention(
        torch.ones(1, 1, 1, 1, dtype=torch.float16), key, key,
        torch.tensor([[[[2**31 // block]]]], dtype=torch.int32),
        scale_value=1.0, sparse_block_size=block, sparse_mode=0,
    )  # fmt: skip
    assert out.item() == 1
    assert softmax_sum.item() == block


def test_more_keys_than_indices_name() -> None:
    query, weights = torch.empty(1, 1, 8, 16, device="meta"), torch.empty(1, 1, 8, device="meta")
    key = torch.empty(1, 2**31, 1, 16, device="meta")
    with pytest.raises(ValueError, match=r"key: expected at most 2147483647 tokens"):
        torch.ops.ascend.lightning_indexer(query, key, weights, layout="BSND", sparse_count=4)


def test_larger_blocks_than_lengths_count() -> None:
    key = torch.ones(1, 1, 1, 16).expand(1, 2**32, 1, 16)
    with pytest.raises(ValueError, match=r"key: expected at most 2147483647 tokens"):
        torch.ops.ascend.sparse_flash_attention(
            torch.ones(1, 1, 1, 16), key, key, torch.zeros(1, 1, 1, 4, dtype=torch.int32),
            scale_value=1.0, layout="BSND", layout_kv="PA_BSND",
            actual_seq_lengths_key=torch.tensor([8]),
            block_table=torch.zeros(1, 1, dtype=torch.int32),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["ori_kv", "cmp_kv"])
def test_more_joined_keys_than_indices_name(name: str) -> None:
    """Rows of one key, over which a call would take hours."""
    given = {"query": torch.ones(1, 2, 4, 16), "ori_kv": torch.ones(1, 2, 1, 16)}
    given |= {"cmp_kv": torch.ones(1, 2, 1, 16), "cmp_sparse_indices": None}
    given[name] = torch.ones(1, 1, 1, 16).expand(-1, 2**31, -1, -1)
    with pytest.raises(ValueError, match=f"{name}: expected at most 2147483647 tokens"):
        torch.ops.ascend.sparse_flash_mla(**given, scale_value=1.0)


def test_int8_heads_whose_products_overflow() -> None:
    query = torch.full((1, 1, 1, 2**17), -128, dtype=torch.int8)
    scale = torch.ones(1)
    scales = {"deq_scale1": scale, "quant_scale1": scale, "deq_scale2": scale}
    with pytest.raises(ValueError, match=r"query: expected a head size of at most 131071 in int8"):
        ascend_attn_ops.prompt_flash_attention(
            query, query, query, num_heads=1, layout="BNSD", scale_value=1.0, **scales
        )


def empty(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, device=device, dtype=dtype)


@pytest.mark.parametrize("batch", [3, 2**50])
def test_empty_calls_cost_nothing(batch: int) -> None:
    """One entry per batch would take all memory there is."""
    query, indices = empty(batch, 0, 1, 1), empty(batch, 0, 1, 1, dtype=torch.int32)
    out, *_ = ascend_attn_ops.sparse_flash_attention(query, query, query, indices, scale_value=1.0)
    assert out.shape == query.shape
    indices, _ = ascend_attn_ops.lightning_indexer(query, query, empty(batch, 0, 1), sparse_count=2)
    assert indices.shape == (batch, 0, 1, 2)
    dense = {"num_heads": 1, "layout": "BSND", "scale_value": 1.0}
    out, *_ = ascend_attn_ops.flash_attention_score(query, query, query, **dense)
    assert out.shape == query.shape


@pytest.mark.parametrize(("pre", "next_"), list(itertools.product([-1, 3], [0, 3])))
def test_fake_calls_cost_nothing(pre: int, next_: int) -> None:
    query = empty(2**50, 1, 4, 1, device="meta", dtype=torch.float16)
    mask = empty(4, 4, device="meta", dtype=torch.bool)
    out = ascend_attn_ops.prompt_flash_attention(
        query, query, query, num_heads=1, layout="BNSD", atten_mask=mask, pre_tokens=pre,
        next_tokens=next_ if pre >= 0 else 3,
    )  # fmt: skip
    assert out.shape == query.shape
