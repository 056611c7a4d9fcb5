"""int8 inputs of prompt_flash_attention where the samples do not go: scales, sums and long rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops import _C, reference
from support import fresh
from support.samples import OPERATORS, Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")


def qkv(
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
        "num_heads": tensors[0].shape[1],
        "num_key_value_heads": tensors[1].shape[1],
        "layout": "BNSD",
        "scale_value": scale_value,
        "atten_mask": atten_mask,
        "next_tokens": 2**31 - 1,
    }


def check(
    tensors: list[Tensor],
    quantization: dict[str, Tensor],
    scale_value: float = 0.4,
    atten_mask: Tensor | None = None,
) -> Tensor:
    """The operator's output, which is close to the reference's."""
    sample = sample_of(tensors, {**options(tensors, scale_value, atten_mask), **quantization})
    (out,) = sample.call(ascend_attn_ops)
    assert out.dtype == torch.float16
    OPERATORS[sample.operator].assert_matches_reference(sample, (out,))
    return out


def sample_of(tensors: Sequence[Tensor], options: dict[str, Any]) -> Sample:
    inputs = dict(zip(("query", "key", "value"), tensors, strict=True))
    return Sample("prompt_flash_attention", "", inputs, options)


# 5000 and -5000: all exponentials but the smallest saturate. 0.4: all become 0.
@pytest.mark.parametrize("quant1", [127.0, 300.0, 5000.0, 1.0, 0.4, -127.0, -300.0, -5000.0])
def test_quant_scale1(quant1: float) -> None:
    out = check(qkv(), scales(quant1=quant1))
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
    out = check(qkv(4, 2), scales(deq1), scale_value, mask if masked else None)
    assert bool(out[:, :, 33].any()) != masked


def test_the_upper_19_bits_of_a_scale_of_uint64_count() -> None:
    whole = scales(deq1=3e-4, deq2=1e-4)
    bits = {name: whole[name].view(torch.int32).long() for name in ("deq_scale1", "deq_scale2")}
    upper, filled = (
        whole | {name: (x & ~0x1FFF | below).to(torch.uint64) for name, x in bits.items()}
        for below in (0, 0x1FFF)
    )
    assert torch.equal(check(qkv(), filled), check(qkv(), upper))


def test_scores_that_fp16_cannot_represent_are_not_hidden() -> None:
    """Infinite in fp16, and inf - inf is not a number: no plausible output comes of them."""
    tensors = qkv()
    arguments = {**options(tensors, 2.0, None), **scales(deq1=1.0)}
    out = ascend_attn_ops.prompt_flash_attention(*tensors, **arguments)
    expected = reference.prompt_flash_attention(*tensors, **arguments)
    assert bool(out.isnan().any())
    torch.testing.assert_close(out.isnan(), expected.isnan(), rtol=0, atol=0)


def test_the_extreme_products() -> None:
    """-128 on both sides of every product: the largest that int8 gives."""
    tensors = [torch.full_like(x, -128) for x in qkv(d=512)]
    out = check(tensors, scales(deq1=1e-6))
    assert out.unique().tolist() == pytest.approx([-127 * 128 * 1e-4], rel=1e-3)


def test_a_sum_beyond_int32() -> None:
    """All keys alike: 140000 exponentials of 127, times -128, are less than -2^31."""
    tensors = [torch.full_like(x, -128) for x in qkv(1, 1, sq=3, skv=140000, d=8)]
    out = check(tensors, scales(deq2=1e-4))
    assert out.unique().tolist() == pytest.approx([-127 * 128 * 1e-4], rel=1e-3)


@pytest.mark.parametrize(
    ("sq", "skv"), [(650, 700), (300, 2100), (140, 4700), (70, 9000), (3, 70000)]
)
def test_products_kept_between_the_passes(sq: int, skv: int) -> None:
    """Fewer rows at once where there are more keys, and none of the longest."""
    check(qkv(2, 1, sq=sq, skv=skv, d=16), scales())


def test_every_head_size() -> None:
    for d in (1, 3, 4, 17, 31, 66):
        check(qkv(2, 1, sq=20, skv=70, d=d), scales(), scale_value=0.2)


# Processors without 8-bit products, and without those of bfloat16 beside AVX512.
@pytest.mark.parametrize("instructions", ["SSE41", "AVX2", "AVX512_CORE"])
def test_other_processors(instructions: str, tmp_path: Path) -> None:
    """Integer sums are exact however they are made, so that the results agree bit for bit."""
    if "brgemm" not in _C.cpu_implementations()["int8 products"]:
        pytest.skip("this processor has no 8-bit products that oneDNN could hold back")
    code = f"""
        import torch, ascend_attn_ops
        from test_prompt_flash_attention_int8 import options, qkv, scales
        tensors = qkv(4, 2, d=37)
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
    tensors = qkv(4, 2, d=37)
    assert torch.equal(out, check(tensors, scales()))
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 50, 16).bfloat16()
    sample = sample_of((q, k, v), options([q, k, v], 0.25, None))
    OPERATORS[sample.operator].assert_matches_reference(sample, (half,))
