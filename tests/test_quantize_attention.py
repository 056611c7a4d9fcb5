"""The quantisers: what they return, and the error of the attention that it leads to."""

from __future__ import annotations

import struct

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops import quantize_attention_inputs, reference, sparse_mode_mask
from ascend_attn_ops.nn.quantization import QuantizedAttentionInputs
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

SCALE_DTYPES = [torch.float32, torch.uint64]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def qkv(
    shape: tuple[int, ...] = (2, 4, 90, 32), key_heads: int = 2, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    key_shape = (shape[0], key_heads, *shape[2:])
    sizes = (shape, 1.0), (key_shape, 3.0), (key_shape, 0.2)
    return [(torch.randn(s, generator=generator) * size).to(dtype) for s, size in sizes]


def number(scale: Tensor) -> float:
    """Returns the number that the operator reads from a scale."""
    if scale.dtype == torch.float32:
        return float(scale.item())
    return float(struct.unpack("<f", struct.pack("<I", int(scale.item()) & 0xFFFFE000))[0])


def real(inputs: QuantizedAttentionInputs, s_query: float) -> list[Tensor]:
    """query, key and value as the scales say them, with that scale of query."""
    s_key = number(inputs.deq_scale1) / s_query
    s_value = number(inputs.deq_scale2) * 127
    tensors = inputs.query, inputs.key, inputs.value
    return [x.double() * s for x, s in zip(tensors, (s_query, s_key, s_value), strict=True)]


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_is_within_half_a_step(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    tensors = qkv(dtype=dtype)
    inputs = quantize_attention_inputs(*tensors, scale_dtype=scale_dtype)
    s_query = float(tensors[0].abs().max()) / 127
    # Rounded up to 19 bits, a sign, 8 bits of exponent and 10 of fraction; or to 32 bits.
    spacing = 2**-10 if scale_dtype == torch.uint64 else 2**-23
    for name, before, after in zip("qkv", tensors, real(inputs, s_query), strict=True):
        step = float(before.abs().max()) / 127 * (1 + (0 if name == "q" else spacing))
        assert float((before.double() - after).abs().max()) <= step / 2 * (1 + 1e-5), name
    assert inputs.quant_scale1.tolist() == [127.0]
    assert [x.dtype for x in inputs[:3]] == [torch.int8] * 3
    assert inputs.deq_scale1.dtype == inputs.deq_scale2.dtype == scale_dtype
    assert int(inputs.query.abs().max()) == 127


def test_a_uint64_scale_loses_nothing_in_the_operator() -> None:
    for scale in quantize_attention_inputs(*qkv(), scale_dtype=torch.uint64)[3::2]:
        bits = int(scale.item())
        assert bits == bits & 0xFFFFE000


def error_bound(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """How far the int8 path may be from attention in exact arithmetic, per element.

    With s the steps of the tensors, an element of query is off by at most s_q / 2, so that

        |q8 k8 - q k|  <=  s_q / 2 * sum|k| + s_k / 2 * sum|q| + D * s_q * s_k / 4.

    A score passes three roundings to fp16: of the product, of scale and of both together, each of
    2^-11. If no score is off by more than e, no probability is off by more than a factor of
    exp(2 e), and their weighted mean of the values by (exp(2 e) - 1) * max|v|. An exponential is
    off by 1 / 254 after its rounding, which moves the output by sum|v| / 254 / sum(p) at most, and
    an element of value by s_v / 2, whose factors, the rounded exponentials over the sum of the
    others, add up to 1 + n / 254 / sum(p) at most. In the end the output is rounded to fp16.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    # 2^-10: scales of uint64 are that much larger at most.
    s_q, s_k, s_v = (float(x.abs().max()) / 127 * (1 + 2**-10) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.mT * scale
    of_products = s_q / 2 * k.abs().sum(-1)[..., None, :] + s_k / 2 * q.abs().sum(-1, keepdim=True)
    of_products = scale * (of_products + q.shape[-1] * s_q * s_k / 4)
    of_scores = of_products + 3.01 * 2**-11 * (scores.abs() + of_products) + 2**-24
    largest = torch.where(keep, of_scores, 0).amax(-1, keepdim=True)
    p = scores.masked_fill(~keep, -torch.inf)
    p = (p - p.amax(-1, keepdim=True)).exp()
    # The operator adds exponentials of rounded scores, so this sum does too.
    total = p.sum(-1, keepdim=True) * (-2 * largest).exp()
    kept = keep.double()
    count = kept.sum(-1, keepdim=True)
    out = p @ v / p.sum(-1, keepdim=True)
    bound = (2 * largest).expm1() * v.abs().amax((-1, -2), keepdim=True)
    bound = bound + kept @ v.abs() / 254 / total + s_v / 2 * (1 + count / 254 / total)
    return bound + 2**-11 * (out.abs() + bound) + 2**-25


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sparse_mode", [0, 3])
def test_error_of_the_attention(
    sparse_mode: int, dtype: torch.dtype, scale_dtype: torch.dtype
) -> None:
    tensors = [x / 2 for x in qkv(dtype=dtype)]
    q, k, v = tensors
    options = {
        "num_heads": q.shape[1], "num_key_value_heads": k.shape[1], "layout": "BNSD",
        "sparse_mode": sparse_mode, "scale_value": 32**-0.5,
    }  # fmt: skip
    keep = torch.ones(90, 90, dtype=torch.bool)
    if sparse_mode:
        keep = sparse_mode_mask(sparse_mode, 90, 90)
    inputs = quantize_attention_inputs(*tensors, scale_dtype=scale_dtype)
    out = ascend_attn_ops.prompt_flash_attention(**inputs._asdict(), **options)
    assert out.dtype == torch.float16
    mask = None if sparse_mode == 0 else torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    doubles = [x.double() for x in tensors]
    exact = reference.prompt_flash_attention(*doubles, **options, atten_mask=mask)
    bound = error_bound(*tensors, keep, 32**-0.5)
    error = (out.double() - exact).abs()
    assert bool((error <= bound).all()), float((error / bound).max())
    # The bound is for the worst case: on the whole the error is far below the values, and the
    # bound itself says something.
    assert float(bound.median()) < float(v.abs().max())
    assert float(error.square().mean().sqrt()) < 0.02 * float(v.double().square().mean().sqrt())


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_tensor_of_zeros(zero: int, scale_dtype: torch.dtype) -> None:
    tensors = qkv()
    tensors[zero].zero_()
    inputs = quantize_attention_inputs(*tensors, scale_dtype=scale_dtype)
    assert not bool(inputs[zero].any())
    out = ascend_attn_ops.prompt_flash_attention(
        **inputs._asdict(), num_heads=4, num_key_value_heads=2, layout="BNSD"
    )
    mean = tensors[2].mean(-2, keepdim=True).repeat_interleave(2, 1)
    assert bool(inputs.deq_scale1.cpu().bool().all())
    if zero == 2:
        assert not bool(out.any())
    else:  # all keys alike: the mean of the values
        torch.testing.assert_close(out.float(), mean.expand(out.shape), atol=0.004, rtol=0)


def test_values_beyond_what_their_product_can_represent() -> None:
    tiny = [x * 1e-38 for x in qkv()]
    inputs = quantize_attention_inputs(*tiny)
    assert number(inputs.deq_scale1) == 2.0**-126
    out = ascend_attn_ops.prompt_flash_attention(
        **inputs._asdict(), num_heads=4, num_key_value_heads=2, layout="BNSD"
    )
    assert not bool(out.any())
    huge = [x * 1e37 for x in qkv()]
    with pytest.raises(ValueError, match="key: expected elements whose scale times query's"):
        quantize_attention_inputs(*huge)


def test_a_scale_that_uint64_would_round_to_infinity() -> None:
    """The product is below the largest float32, and above the largest of 19 bits."""
    largest = torch.full((1,), 127 * 1.8446743e19)
    assert number(quantize_attention_inputs(largest, largest, largest).deq_scale1) < torch.inf
    with pytest.raises(ValueError, match=r"finite in torch.uint64, got a product of 3.4e\+38"):
        quantize_attention_inputs(largest, largest, largest, scale_dtype=torch.uint64)


def test_empty_tensors() -> None:
    inputs = quantize_attention_inputs(*qkv((2, 4, 0, 32)))
    assert inputs.query.shape == (2, 4, 0, 32)


@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    torch.compiler.reset()
    compiled = torch.compile(quantize_attention_inputs, backend="aot_eager", fullgraph=True)
    tensors = qkv(dtype=dtype)
    expected = quantize_attention_inputs(*tensors, scale_dtype=scale_dtype)
    actual = compiled(*tensors, scale_dtype=scale_dtype)
    assert all(map(torch.equal, actual, expected))
    tensors[1][0] = torch.inf
    with pytest.raises(RuntimeError, match="expected finite elements"):
        compiled(*tensors, scale_dtype=scale_dtype)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_elements_that_are_not_finite(index: int, bad: float) -> None:
    tensors = qkv()
    tensors[index][0, 1, 2, 3] = bad
    name = ("query", "key", "value")[index]
    with pytest.raises(ValueError, match=f"{name}: expected finite elements, got"):
        quantize_attention_inputs(*tensors)


def test_tensors_that_require_a_gradient() -> None:
    inputs = quantize_attention_inputs(*(x.requires_grad_() for x in qkv()))
    assert not any(x.requires_grad for x in inputs)


def largest_of(x: Tensor) -> Tensor:
    return x.float().abs().amax(-1, keepdim=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_latent_cache(dtype: torch.dtype) -> None:
    latent = torch.randn(3, 1, 512).to(dtype) * 3
    latent[1, 0, 128:256] = 0
    rope = torch.randn(3, 1, 64).to(dtype if dtype.itemsize == 2 else torch.bfloat16)
    rows = ascend_attn_ops.quantize_latent(latent, rope)
    assert rows[..., 512:640].view(rope.dtype).equal(rope)
    tiles, scales = latent.float().view(12, 128), rows[..., 640:].reshape(-1, 4).view(torch.float32)
    assert scales.equal(largest_of(tiles) * torch.tensor(1 / 127))
    back = rows[..., :512].reshape(12, 128) * scales
    assert ((back - tiles).abs() <= 0.5001 * scales).all()


def test_queries_and_keys_of_an_indexer() -> None:
    tensors = torch.randn(1, 2, 64, 128), torch.randn(1, 900, 1, 128)
    tensors[1][0, 7] = 0
    for x in tensors:
        x8, scale = ascend_attn_ops.quantize_index_keys(x)
        step = largest_of(x) * torch.tensor(1 / 127)
        assert scale.equal(step[..., 0].half())
        assert ((x8 * step - x).abs() <= 0.5001 * step).all()
