"""compress_keys: the weighted means of windows of tokens."""

from __future__ import annotations

import pytest
import torch
from ascend_attn_ops import compress_keys
from torch import Tensor


def inputs(tokens: int, features: int, ratio: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = (2, tokens, features), (2, tokens, features), (ratio, features)
    values, logits, bias = (
        torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes
    )
    return values, logits, bias


def one_by_one(values: Tensor, logits: Tensor, bias: Tensor, overlap: bool) -> Tensor:
    """(S, F) of one sequence as (S // r, D), from the definition."""
    ratio, size = len(bias), values.shape[-1] // (2 if overlap else 1)
    keys = []
    for w in range(len(values) // ratio):
        own = slice(w * ratio, (w + 1) * ratio)
        x, z = values[own, -size:], logits[own, -size:] + bias[:, -size:]
        if overlap and w > 0:
            before = slice((w - 1) * ratio, w * ratio)
            x = torch.cat([values[before, :size], x])
            z = torch.cat([logits[before, :size] + bias[:, :size], z])
        keys.append((x * z.softmax(0)).sum(0))
    return torch.stack(keys) if keys else values.new_zeros(0, size)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens", [0, 3, 4, 19])
def test_against_the_definition(tokens: int, overlap: bool) -> None:
    values, logits, bias = inputs(tokens, 6)
    keys = compress_keys(values, logits, bias, overlap=overlap)
    for batch in range(2):
        expected = one_by_one(values[batch], logits[batch], bias, overlap)
        # The weights are rounded to float32, as in transformers.
        torch.testing.assert_close(keys[batch], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lengths", [(9,), (3, 9), (4, 0, 11, 1, 8), (2, 1)])
def test_packed_sequences_are_compressed_each_by_itself(
    lengths: tuple[int, ...], overlap: bool
) -> None:
    parts = [inputs(length, 6) for length in lengths]
    bias = parts[0][2]
    values, logits = (torch.cat([part[i][0] for part in parts]) for i in (0, 1))
    ends = torch.tensor(lengths).cumsum(0).tolist()
    keys = compress_keys(values, logits, bias, overlap=overlap, actual_seq_lengths=ends)
    alone = [compress_keys(x[:1], y[:1], bias, overlap=overlap)[0] for x, y, _ in parts]
    assert torch.equal(keys, torch.cat(alone))


def test_the_window_before_may_come_from_a_cache() -> None:
    values, logits, bias = inputs(16, 6)
    whole = compress_keys(values, logits, bias, overlap=True)
    previous = values[:, 4:8, :3], (logits[:, 4:8] + bias)[..., :3]
    rest = compress_keys(values[:, 8:], logits[:, 8:], bias, overlap=True, previous=previous)
    assert torch.equal(rest, whole[:, 2:])


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients(overlap: bool) -> None:
    leaves = [x.requires_grad_() for x in inputs(9, 4)]

    def compress(*tensors: Tensor) -> Tensor:
        return compress_keys(*tensors, overlap=overlap)

    # The softmax is in float32.
    assert torch.autograd.gradcheck(compress, leaves, eps=1e-2, atol=1e-3, rtol=1e-3)
