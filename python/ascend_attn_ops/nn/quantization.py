"""Quantisation: of the int8 path of prompt_flash_attention, and of the rows of int8 caches."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional as F

from ascend_attn_ops._core.arguments import check_memory, check_tensor, dtype_name, shown, wrong
from ascend_attn_ops._core.torch_private import assert_async

_NAME = "ascend::quantize_attention_inputs"
_LATENT_NAME, _KEYS_NAME = "ascend::quantize_latent", "ascend::quantize_index_keys"
_DTYPES = torch.float16, torch.bfloat16, torch.float32
_LARGEST = 127.0
_SMALLEST_SCALE = 2.0**-126
_TILE = 128  # elements of a latent per scale
# The device uses the upper 19 bits of a float32 that is passed as uint64.
_UNUSED_BITS = {torch.float32: 0, torch.uint64: 13}


class QuantizedAttentionInputs(NamedTuple):
    """Arguments of prompt_flash_attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    deq_scale1: Tensor
    quant_scale1: Tensor
    deq_scale2: Tensor


@torch.no_grad()
def quantize_attention_inputs(
    query: Tensor, key: Tensor, value: Tensor, *, scale_dtype: torch.dtype = torch.float32
) -> QuantizedAttentionInputs:
    """Quantise query, key and value to int8, with the scales that prompt_flash_attention takes.

    Quantisation is symmetric, with one scale per tensor. With a = max(abs(x)) for each tensor x::

        x8 = round(x / s),  s = a / 127

        deq_scale1   = s_query * s_key        for the integer products of query and key
        quant_scale1 = 127                    for the exponentials, which are at most 1
        deq_scale2   = s_value / 127          for their integer products with value

    A scale that its dtype cannot represent is rounded up, and key and value are quantised with the
    rounded scale. The call synchronises with the device once, to read the three maxima.

    Args:
        query, key, value: any shape and layout; float16, bfloat16 or float32.
        scale_dtype: dtype of deq_scale1 and deq_scale2: torch.float32, or torch.uint64, which holds
            the bits of a float32, of which the device uses the upper 19.

    Returns:
        query, key, value: int8, same shapes and device; deq_scale1, deq_scale2: (1,) of
        scale_dtype; quant_scale1: (1,), float32. The names are those of prompt_flash_attention's
        arguments: pass them as `**inputs._asdict()`.

    Raises:
        TypeError: not a tensor, or one of another dtype, or scale_dtype is neither of the two.
        ValueError: a tensor is on another device than query, has infinite or NaN elements, or
            elements so large that the product of two scales is infinite.
        NotImplementedError: a tensor is sparse, or on the device meta.

    Example:
        >>> import torch, ascend_attn_ops
        >>> query, key = torch.randn(2, 1, 4, 100, 64, dtype=torch.bfloat16)
        >>> inputs = ascend_attn_ops.quantize_attention_inputs(query, key, torch.ones_like(key))
        >>> out = ascend_attn_ops.prompt_flash_attention(
        ...     **inputs._asdict(), num_heads=4, layout="BNSD", sparse_mode=3, scale_value=64**-0.5)
        >>> round(out[0, 0, 99, 0].item(), 2), out.dtype  # weights of sum 1
        (1.0, torch.float16)
    """
    if not isinstance(scale_dtype, torch.dtype) or scale_dtype not in _UNUSED_BITS:
        expected = "torch.float32 or torch.uint64"
        raise wrong(TypeError, _NAME, "scale_dtype", expected, shown(scale_dtype))
    tensors = {"query": query, "key": key, "value": value}
    largest = _largest(tensors)
    s_query, s_key, s_value = (
        (largest / _LARGEST).clamp(min=_SMALLEST_SCALE).where(largest > 0, 1.0).unbind()
    )
    deq_scale1 = _rounded_up(s_query * s_key, scale_dtype)
    deq_scale2 = _rounded_up(s_value / _LARGEST, scale_dtype)
    return QuantizedAttentionInputs(
        query=_to_int8(query, s_query),
        key=_to_int8(key, deq_scale1.double() / s_query),
        value=_to_int8(value, deq_scale2.double() * _LARGEST),
        deq_scale1=_scale(deq_scale1, scale_dtype, query.device),
        quant_scale1=torch.full((1,), _LARGEST, device=query.device),
        deq_scale2=_scale(deq_scale2, scale_dtype, query.device),
    )


def _largest(tensors: dict[str, Tensor]) -> Tensor:
    """Return the largest absolute value of each tensor, 0 for an empty one; on the host in eager.

    Compiled code does not read it, and checks it when it runs.
    """
    for name, tensor in tensors.items():
        check_tensor(_NAME, name, tensor)
        if not is_compiling():
            check_memory(_NAME, name, tensor)
        if tensor.dtype not in _DTYPES:
            expected = "dtype float16, bfloat16 or float32"
            raise wrong(TypeError, _NAME, name, expected, str(tensor.dtype))
        if tensor.device != tensors["query"].device:
            expected = f"device {tensors['query'].device} (query's)"
            raise wrong(ValueError, _NAME, name, expected, str(tensor.device))
    if tensors["query"].is_meta:
        expected = "elements to read"
        raise wrong(NotImplementedError, _NAME, "query", expected, "a tensor on the device meta")
    values = [x.abs().amax() if x.numel() else x.new_zeros(()) for x in tensors.values()]
    largest = torch.stack([x.float() for x in values])
    if is_compiling():
        assert_async(largest.isfinite().all(), f"{_NAME}: expected finite elements")
        return largest.double()
    for name, value in zip(tensors, largest.tolist(), strict=True):
        if not math.isfinite(value):
            raise wrong(ValueError, _NAME, name, "finite elements", str(value))
    return largest.cpu().double()


def _to_int8(x: Tensor, scale: Tensor) -> Tensor:
    return x.to(torch.float32, copy=True).div_(scale).round_().to(torch.int8)


def _rounded_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest scale of at least `scale` that the operator can read from `dtype`."""
    unused = (1 << _UNUSED_BITS[dtype]) - 1
    nearest = scale.clamp(min=_SMALLEST_SCALE).float()
    bits = nearest.view(torch.int32) + (nearest < scale)
    rounded = ((bits + unused) & ~unused).view(torch.float32)
    if not is_compiling() and not rounded.isfinite():
        expected = f"elements whose scale times query's is finite in {dtype}"
        raise wrong(ValueError, _NAME, "key", expected, f"a product of {float(scale):.3g}")
    return rounded


def _scale(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.uint64:
        value = value.view(torch.int32).long().view(torch.uint64)
    return value.reshape(1).to(device)


@torch.no_grad()
def quantize_latent(latent: Tensor, key_rope: Tensor) -> Tensor:
    """Make the rows of an int8 latent cache, 656 bytes a token.

    Each row has the 512 elements of the latent in int8, the rope as it is, and four float32 scales,
    one for 128 elements: a / 127 with a = max(abs(x)). Ties go to even, as in
    npu_dynamic_block_quant. :func:`scatter_pa_kv_cache_` writes the rows, its `key`, to a cache
    (num_blocks, block_size, 1, 656).

    Args:
        latent: (..., 512), after its norm; float16, bfloat16 or float32.
        key_rope: (..., 64), rotated; the dtype of the queries, of 16 bits on devices.

    Returns:
        The rows, (..., 656), int8. Other sizes, C and Dr, have rows of C bytes, Dr elements of
        key_rope's dtype and 4 ceil(C / 128) bytes, for :func:`kv_quant_sparse_flash_attention`
        with the device limits off.

    Raises:
        TypeError: not a tensor, or one of another dtype.
        ValueError: a shape or a device disagrees.

    Example:
        >>> import torch, ascend_attn_ops
        >>> latent, rope = torch.randn(3, 1, 512), torch.randn(3, 1, 64, dtype=torch.bfloat16)
        >>> rows = ascend_attn_ops.quantize_latent(latent, rope)
        >>> rows.shape[-1], torch.equal(rows[..., 512:640].view(torch.bfloat16), rope)
        (656, True)
    """
    for name, x in (("latent", latent), ("key_rope", key_rope)):
        _check_rows(_LATENT_NAME, name, x)
    if key_rope.shape[:-1] != latent.shape[:-1]:
        expected = f"shape {(*latent.shape[:-1], key_rope.shape[-1])}"
        raise wrong(ValueError, _LATENT_NAME, "key_rope", expected, str(tuple(key_rope.shape)))
    if key_rope.device != latent.device:
        expected = f"device {latent.device} (latent's)"
        raise wrong(ValueError, _LATENT_NAME, "key_rope", expected, str(key_rope.device))
    size = latent.shape[-1]
    tiles = F.pad(latent.float(), (0, -size % _TILE)).unflatten(-1, (-1, _TILE))
    largest = tiles.abs().amax(-1, keepdim=True)
    rows = _rounded_to_int8(tiles * (largest.reciprocal() * _LARGEST)).flatten(-2)[..., :size]
    scales = (largest * (1 / _LARGEST)).squeeze(-1)
    parts = (rows, *(x.contiguous().view(torch.int8) for x in (key_rope, scales)))
    return torch.cat(parts, -1)


@torch.no_grad()
def quantize_index_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the keys, or the queries, of an indexer to int8, with one scale for each row.

    The scale is a / 127 with a = max(abs(x)) of the row. Ties go to even, as in npu_dynamic_quant.
    float16 cannot represent scales below 6e-8: such a key has the score 0.

    Args:
        keys: (..., D), rotated by a Hadamard matrix where the model has one; float16, bfloat16 or
            float32.

    Returns:
        int8 numbers of the same shape, and float16 scales without the last axis, as
        :func:`quant_lightning_indexer` takes them.

    Raises:
        TypeError: not a tensor, or one of another dtype.
        ValueError: a tensor without axes.

    Example:
        >>> import torch, ascend_attn_ops
        >>> keys, scales = ascend_attn_ops.quantize_index_keys(torch.tensor([[1.0, -2.0], [0, 0]]))
        >>> keys.tolist(), scales.dtype
        ([[64, -127], [0, 0]], torch.float16)
    """
    _check_rows(_KEYS_NAME, "keys", keys)
    x = keys.float()
    largest = x.abs().amax(-1, keepdim=True)
    scales = (largest * (1 / _LARGEST)).squeeze(-1)
    return _rounded_to_int8(x * (_LARGEST / largest)), scales.half()


def _check_rows(name: str, argument: str, x: Tensor) -> None:
    check_tensor(name, argument, x)
    if x.dtype not in _DTYPES:
        expected = "dtype float16, bfloat16 or float32"
        raise wrong(TypeError, name, argument, expected, dtype_name(x.dtype))
    if not (x.dim() and x.shape[-1]):
        raise wrong(ValueError, name, argument, "shape (..., D)", str(tuple(x.shape)))


def _rounded_to_int8(x: Tensor) -> Tensor:
    """NaN, as of zeros times an infinite factor, become 0."""
    return x.nan_to_num(nan=0.0).round().clamp(-128, _LARGEST).to(torch.int8)
