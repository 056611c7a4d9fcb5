"""prompt_flash_attention: torch's own attention agrees, decisions, and what its function adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_check.samples.prompt_flash_attention import PromptCase, build
from ascend_attn_ops import _C, prompt_flash_attention, reference, sparse_mode_mask
from ascend_attn_ops._core.device_limits import table
from support import fresh
from support.samples import OPERATORS, Sample
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
        "A2": ["float16", "bfloat16", "int8"], "A3": ["float16", "bfloat16", "int8"],
        "310P": ["float16"], "950": ["float16", "bfloat16"],
    }  # fmt: skip


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


# int8 inputs where the samples do not go: scales, sums and long rows.


def int8_qkv(
    heads: int = 2, key_heads: int = 2, sq: int = 70, skv: int = 300, d: int = 64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, heads, sq, d), (1, key_heads, skv, d), (1, key_heads, skv, d)
    return [torch.randint(-128, 128, x, generator=generator, dtype=torch.int8) for x in shapes]


def scales(deq1: float = 3e-4, quant1: float = 127.0, deq2: float = 1e-4) -> dict[str, Tensor]:
    values = {"deq_scale1": deq1, "quant_scale1": quant1, "deq_scale2": deq2}
    return {name: torch.tensor([x]) for name, x in values.items()}


def options(tensors: list[Tensor], scale_value: float, atten_mask: Tensor | None) -> dict:
    return {
        "num_heads": tensors[0].shape[1], "num_key_value_heads": tensors[1].shape[1],
        "layout": "BNSD", "scale_value": scale_value, "atten_mask": atten_mask,
        "next_tokens": 2**31 - 1,
    }  # fmt: skip


def check(
    tensors: list[Tensor], quantization: dict[str, Tensor], scale_value: float = 0.4,
    atten_mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The operator's output, which is close to the reference's."""
    sample = sample_of(tensors, {**options(tensors, scale_value, atten_mask), **quantization})
    (out,) = sample.call(ascend_attn_ops)
    assert out.dtype == torch.float16
    OPERATORS[sample.operator].bounds.check(sample, (out,))
    return out


def sample_of(tensors: Sequence[Tensor], options: dict[str, Any]) -> Sample:
    inputs = dict(zip(("query", "key", "value"), tensors, strict=True))
    return Sample("prompt_flash_attention", "", inputs, options)


# 5000 and -5000: all exponentials but the smallest saturate. 0.4: all become 0.
@pytest.mark.parametrize("quant1", [127.0, 300.0, 5000.0, 1.0, 0.4, -127.0, -300.0, -5000.0])
def test_quant_scale1(quant1: float) -> None:
    out = check(int8_qkv(), scales(quant1=quant1))
    assert bool(out.any()) == (quant1 != 0.4)


@pytest.mark.parametrize(
    ("deq1", "scale_value"),
    [
        (-3e-4, 0.4),
        (3e-4, -0.4),
        (-3e-4, -0.4),
        (1.0, 1e-3),  # products beyond what fp16 holds saturate
        (2.0, -1e-3),
        (1e-9, 6e4),  # products that are subnormal in fp16
        (3e-8, 1.0),
        (0.0, 1.0),
        (3e-4, 1e-9),  # a scale that fp16 makes 0
        (6e-3, 6.0),  # scores that grow to thousands
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_scales_of_scores(deq1: float, scale_value: float, masked: bool) -> None:
    mask = torch.rand(70, 300, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[33] = True
    out = check(int8_qkv(4, 2), scales(deq1), scale_value, mask if masked else None)
    assert bool(out[:, :, 33].any()) != masked


def test_the_upper_19_bits_of_a_scale_of_uint64_count() -> None:
    whole = scales(deq1=3e-4, deq2=1e-4)
    bits = {name: whole[name].view(torch.int32).long() for name in ("deq_scale1", "deq_scale2")}
    upper, filled = (
        whole | {name: (x & ~0x1FFF | below).to(torch.uint64) for name, x in bits.items()}
        for below in (0, 0x1FFF)
    )
    assert torch.equal(check(int8_qkv(), filled), check(int8_qkv(), upper))


def test_scores_that_fp16_cannot_represent_are_not_hidden() -> None:
    """Infinite in fp16, and inf - inf is not a number: no plausible output comes of them."""
    tensors = int8_qkv()
    arguments = {**options(tensors, 2.0, None), **scales(deq1=1.0)}
    out = ascend_attn_ops.prompt_flash_attention(*tensors, **arguments)
    expected = reference.prompt_flash_attention(*tensors, **arguments)
    assert bool(out.isnan().any())
    torch.testing.assert_close(out.isnan(), expected.isnan(), rtol=0, atol=0)


def test_the_extreme_products() -> None:
    """-128 on both sides of every product: the largest that int8 gives."""
    tensors = [torch.full_like(x, -128) for x in int8_qkv(d=512)]
    out = check(tensors, scales(deq1=1e-6))
    assert out.unique().tolist() == pytest.approx([-127 * 128 * 1e-4], rel=1e-3)


def test_a_sum_beyond_int32() -> None:
    """All keys alike: 140000 exponentials of 127, times -128, are less than -2^31."""
    tensors = [torch.full_like(x, -128) for x in int8_qkv(1, 1, sq=3, skv=140000, d=8)]
    out = check(tensors, scales(deq2=1e-4))
    assert out.unique().tolist() == pytest.approx([-127 * 128 * 1e-4], rel=1e-3)


@pytest.mark.parametrize(
    ("sq", "skv"), [(650, 700), (300, 2100), (140, 4700), (70, 9000), (3, 70000)]
)
def test_products_kept_between_the_passes(sq: int, skv: int) -> None:
    """Fewer rows at once where there are more keys, and none of the longest."""
    check(int8_qkv(2, 1, sq=sq, skv=skv, d=16), scales())


def test_every_head_size() -> None:
    for d in (1, 3, 4, 17, 31, 66):
        check(int8_qkv(2, 1, sq=20, skv=70, d=d), scales(), scale_value=0.2)


# Processors without 8-bit products, and without those of bfloat16 beside AVX512.
@pytest.mark.parametrize("instructions", ["SSE41", "AVX2", "AVX512_CORE"])
def test_other_processors(instructions: str, tmp_path: Path) -> None:
    """Integer sums are exact however they are made, so that the results agree bit for bit."""
    if "brgemm" not in _C.cpu_implementations()["int8 products"]:
        pytest.skip("this processor has no 8-bit products that oneDNN could hold back")
    code = f"""
        import torch, ascend_attn_ops
        from test_prompt_flash_attention import options, int8_qkv, scales
        tensors = int8_qkv(4, 2, d=37)
        with ascend_attn_ops.limits(None):
            out = ascend_attn_ops.prompt_flash_attention(
                *tensors, **options(tensors, 0.4, None), **scales())
            torch.manual_seed(0)
            q, k, v = torch.randn(3, 1, 2, 50, 16).bfloat16()
            half = ascend_attn_ops.prompt_flash_attention(
                q, k, v, num_heads=2, layout="BNSD", scale_value=0.25)
        torch.save((out, half), {str(tmp_path / "out.pt")!r})
        print(*ascend_attn_ops._C.cpu_implementations().values(), sep="; ")
    """
    result = fresh.run(code, ONEDNN_MAX_CPU_ISA=instructions)
    assert result.status == 0, result.err
    assert result.out.count("as float32") == 2  # neither bfloat16 nor int8 products
    out, half = torch.load(tmp_path / "out.pt")
    tensors = int8_qkv(4, 2, d=37)
    assert torch.equal(out, check(tensors, scales()))
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 50, 16).bfloat16()
    sample = sample_of((q, k, v), options([q, k, v], 0.25, None))
    OPERATORS[sample.operator].bounds.check(sample, (half,))
