"""prompt_flash_attention: torch's own attention agrees, decisions, and what its function adds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ascend_attn_ops import prompt_flash_attention, sparse_mode_mask
from ascend_attn_ops.check.samples.prompt_flash_attention import PromptCase, build
from ascend_attn_ops.device_limits import table
from support.samples.prompt_flash_attention_errors import (
    CAUSAL,
    EQUAL,
    LENGTHS,
    MASKED,
    OFFSET,
    THREE,
    TO_INT8,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, D = 3, 4, 32
ALL = 2147483647


def qkv(sq: int, skv: int, dtype: torch.dtype = torch.float64, nk: int = N) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, N, sq, D), (B, nk, skv, D), (B, nk, skv, D)
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(dtype) for x in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    return prompt_flash_attention(
        q, k, v, num_heads=N, num_key_value_heads=k.shape[1], layout="BNSD", **options
    )


@pytest.mark.parametrize("nk", [1, 2, 4])
@pytest.mark.parametrize("mode", [2, 3, 4])
def test_right_padded_batches(mode: int, nk: int) -> None:
    """As if each batch were a call of its own, of its valid tokens."""
    q, k, v = qkv(90, 280, nk=nk)
    query_lengths, key_lengths = [90, 7, 50], [280, 130, 61]
    options = {"sparse_mode": mode, "pre_tokens": 40, "next_tokens": 6}
    lengths = {"actual_seq_lengths_query": query_lengths, "actual_seq_lengths_key": key_lengths}
    out = attend(q, k, v, **lengths, **options)
    for b, (sq, skv) in enumerate(zip(query_lengths, key_lengths, strict=True)):
        kept = sparse_mode_mask(mode, sq, skv, pre_tokens=40, next_tokens=6)
        expected = scaled_dot_product_attention(
            q[b, :, :sq], k[b, :, :skv], v[b, :, :skv], attn_mask=kept, enable_gqa=True
        )
        expected = torch.where(kept.any(-1, keepdim=True), expected, 0)
        torch.testing.assert_close(out[b, :, :sq], expected)
        assert not out[b, :, sq:].any()


def test_a_mask_of_mode_0_is_causal_with_next_tokens() -> None:
    tensors = qkv(6, 9)
    nothing = torch.zeros(6, 9, dtype=torch.bool)
    causal = scaled_dot_product_attention(*tensors, is_causal=True)
    full = scaled_dot_product_attention(*tensors)
    torch.testing.assert_close(attend(*tensors, atten_mask=nothing, next_tokens=0), causal)
    torch.testing.assert_close(attend(*tensors, atten_mask=nothing), full)
    torch.testing.assert_close(attend(*tensors, atten_mask=nothing, sparse_mode=1), full)
    torch.testing.assert_close(attend(*tensors), full)


def test_more_than_the_scores_does_not_count() -> None:
    tensors = qkv(10, 13)
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(B, 1, 16, 32, generator=generator) < 0.3
    out = attend(*tensors, atten_mask=mask, sparse_mode=1)
    other = mask.clone()
    other[:, :, 10:] = ~other[:, :, 10:]
    other[..., 13:] = ~other[..., 13:]
    assert torch.equal(attend(*tensors, atten_mask=other, sparse_mode=1), out)
    expected = scaled_dot_product_attention(*tensors, attn_mask=~mask[:, :, :10, :13])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("rows", [1, B, B + 2])
def test_a_mask_of_two_axes_is_that_of_every_batch(rows: int) -> None:
    """Also where a single query has as many rows as there are batches."""
    tensors = qkv(1, 13)
    mask = torch.rand(rows, 13, generator=torch.Generator().manual_seed(1)) < 0.3
    out = attend(*tensors, atten_mask=mask, sparse_mode=1)
    torch.testing.assert_close(out, scaled_dot_product_attention(*tensors, attn_mask=~mask[:1]))


@pytest.mark.parametrize("value", [2, 255])
def test_any_number_but_zero_masks(value: int) -> None:
    tensors = qkv(6, 9)
    mask = torch.ones(6, 9, dtype=torch.uint8).triu(2) * value
    out = attend(*tensors, atten_mask=mask, sparse_mode=1)
    expected = scaled_dot_product_attention(*tensors, attn_mask=mask == 0)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_padding_is_not_read(dtype: torch.dtype) -> None:
    """NaN behind the valid tokens reaches no output."""
    q, k, v = qkv(20, 70, dtype)
    lengths = {"actual_seq_lengths_query": [20, 3, 0], "actual_seq_lengths_key": [70, 33, 9]}
    expected = attend(q, k, v, **lengths)
    for b in range(B):
        q[b, :, lengths["actual_seq_lengths_query"][b] :] = torch.nan
        for x in (k, v):
            x[b, :, lengths["actual_seq_lengths_key"][b] :] = torch.nan
    assert torch.equal(attend(q, k, v, **lengths), expected)


@pytest.mark.parametrize("offset", [None, torch.tensor([7.0])], ids=["scale", "offset"])
def test_rows_without_keys_are_zero_in_int8(offset: Tensor | None) -> None:
    """And not their offset: as the device leaves them, whatever took their keys away."""
    tensors = qkv(8, 8, torch.float16)
    mask = torch.zeros(B, 8, 8, dtype=torch.bool)
    mask[:, 2] = True
    out = attend(
        *tensors, atten_mask=mask, sparse_mode=1, quant_scale2=torch.tensor([1e-4]),
        quant_offset2=offset, actual_seq_lengths_query=[8, 8, 5],
        actual_seq_lengths_key=[8, 0, 8],
    )  # fmt: skip
    empty = torch.zeros(B, 8, dtype=torch.bool)
    empty[:, 2] = empty[1] = empty[2, 5:] = True
    expected = torch.where(empty, 0, 0 if offset is None else 7)
    assert torch.equal(out, expected[:, None, :, None].expand(out.shape).to(torch.int8))


def test_int8_output_saturates_and_rounds_half_to_even() -> None:
    q = torch.zeros(1, 1, 1, 32, dtype=torch.float16)
    v = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 200.0, -200.0, 126.5]).half()
    v = torch.cat((v, torch.zeros(24).half())).view(1, 1, 1, 32)
    out = prompt_flash_attention(
        q, q, v, num_heads=1, layout="BNSD", quant_scale2=torch.tensor([1.0])
    )
    assert out.flatten()[:8].tolist() == [0, 2, 2, 0, -2, 127, -128, 126]


def test_an_offset_where_the_last_row_keeps_one_key() -> None:
    """The fewest for which rows without keys cannot be."""
    tensors = qkv(6, 4, torch.float16)
    options = {"atten_mask": torch.zeros(6, 4, dtype=torch.bool), "pre_tokens": 2}
    scale, offset = torch.tensor([30.0]), torch.tensor([3.0])
    expected = (attend(*tensors, **options).float() * scale + offset).round().clamp(-128, 127)
    out = attend(*tensors, **options, quant_scale2=scale, quant_offset2=offset)
    assert torch.equal(out, expected.to(torch.int8))


def test_int8_output_is_of_the_result_in_half() -> None:
    """The mean, 1 + 2^-11, is 1 in half."""
    k = torch.zeros(1, 1, 2, 32, dtype=torch.float16)
    v = torch.tensor([1, 1 + 2**-10], dtype=torch.float16).view(1, 1, 2, 1).expand(k.shape)
    scale = torch.tensor([100.49])
    out = prompt_flash_attention(k[:, :, :1], k, v, num_heads=1, layout="BNSD", quant_scale2=scale)
    assert (out == 100).all()


def test_the_default_dtype_does_not_matter() -> None:
    tensors = qkv(5, 6, torch.float16)
    options = {"quant_scale2": torch.tensor([30.0]), "scale_value": 0.25}
    expected = attend(*tensors, **options)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(attend(*tensors, **options), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_scale_of_the_function() -> None:
    q, k, v = qkv(5, 6)
    expected = attend(q, k, v, scale_value=D**-0.5)
    assert torch.equal(attend(q, k, v), expected)
    merged = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    out = prompt_flash_attention(*merged, num_heads=N, layout="BSH")
    assert torch.equal(out.unflatten(2, (N, D)).transpose(1, 2), expected)


def test_the_products_of_the_table() -> None:
    (row,) = (row for row in table() if row["operator"] == "prompt_flash_attention")
    assert {product: v["dtypes"] for (product, cann), v in row["devices"].items()} == {
        "A2": ["float16", "bfloat16", "int8"],
        "A3": ["float16", "bfloat16", "int8"],
        "310P": ["float16"],
        "950": ["float16", "bfloat16"],
    }


# Valid arguments that look like violations.
LEGAL = [
    (EQUAL, {"pre_tokens": -3, "next_tokens": -3}),  # without a mask they do not count
    (CAUSAL, {"pre_tokens": -3, "next_tokens": -3}),
    (THREE, {LENGTHS[0]: [6, 2, 0, 77]}),
    (replace(MASKED, lengths=((6, 0), None)), {"next_tokens": -5}),  # nothing to skip in batch 1
    (replace(OFFSET, s=(9, 6)), {"pre_tokens": 2, "next_tokens": -1}),  # no mask, no band
    (replace(OFFSET, s=(9, 6), mode=2), {}),
    (replace(TO_INT8, s=(9, 6), mode=3), {}),  # rows without keys, and no offset
]


@pytest.mark.parametrize(("case", "changes"), LEGAL, ids=str)
def test_legal(case: PromptCase, changes: dict[str, Any]) -> None:
    build(case, torch.bfloat16).given(**changes).call(torch.ops.ascend)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_gradient_that_nobody_wants(mode: Any) -> None:
    sample = build(EQUAL, torch.bfloat16).requires_grad(("query", "key", "value"))
    with mode():
        sample.call(torch.ops.ascend)
