"""flash_attention_score is what torch's own attention gives, for all that torch can express.

The rules stand here once more, as torch's users write them. flex_attention has no gradient on the
CPU: gradients are compared with those of scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_attn_ops
import pytest
import torch
from support.attention import qkv
from support.turns import by_turns
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

pytestmark = [
    pytest.mark.usefixtures("no_limits"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

B, N, D = 2, 4, 16
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return ascend_attn_ops.flash_attention_score(q, k, v, num_heads=N, layout="BNSD", **options)[0]


def assert_same_gradients(actual: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected)
    d_out = torch.randn(expected.shape, dtype=expected.dtype)
    torch.testing.assert_close(
        torch.autograd.grad(actual, leaves, d_out), torch.autograd.grad(expected, leaves, d_out)
    )


def masks(sq: int, skv: int) -> dict[str, tuple[dict[str, Any], Rule]]:
    """The options of a mask, and which key j a query i keeps. d is how far keys are ahead."""
    d = skv - sq
    prefix = torch.tensor([max(d, 0) + 1, skv - 1])
    everything = {"atten_mask": torch.zeros(sq, skv, dtype=torch.bool)}
    return {
        "everything": ({}, lambda b, h, i, j: j >= 0),
        "causal, upper left": ({"sparse_mode": 2}, lambda b, h, i, j: j <= i),
        "causal, lower right": ({"sparse_mode": 3}, lambda b, h, i, j: j <= i + d),
        "band, upper left": (
            {**everything, "sparse_mode": 0, "pre_tokens": 3, "next_tokens": 5},
            lambda b, h, i, j: (i - 3 <= j) & (j <= i + 5),
        ),
        "band, lower right": (
            {"sparse_mode": 4, "pre_tokens": 4, "next_tokens": 2},
            lambda b, h, i, j: (i + d - 4 <= j) & (j <= i + d + 2),
        ),
        "band before the diagonal": (
            {"sparse_mode": 4, "pre_tokens": 6 + max(d, 0), "next_tokens": -1 + min(d, 0)},
            lambda b, h, i, j: (i + d - 6 - max(d, 0) <= j) & (j <= i + d - 1 + min(d, 0)),
        ),
        "prefix": (
            {"sparse_mode": 6, "prefix": prefix.tolist()},
            lambda b, h, i, j: (j < prefix[b]) | (j <= i + d),
        ),
    }


each_mask = pytest.mark.parametrize("name", masks(1, 1))
each_size = pytest.mark.parametrize(("sq", "skv"), [(12, 12), (7, 13), (13, 9), (70, 600)])
each_group = pytest.mark.parametrize("key_heads", [N, 2, 1])


@by_turns(3)
@each_group
@each_size
@each_mask
def test_masks_of_scaled_dot_product_attention(
    name: str, sq: int, skv: int, key_heads: int
) -> None:
    tensors = [x.requires_grad_() for x in qkv(sq, skv, key_heads)]
    options, rule = masks(sq, skv)[name]
    b, i, j = torch.arange(B)[:, None, None, None], torch.arange(sq)[:, None], torch.arange(skv)
    kept = rule(b, b, i, j).expand(B, 1, sq, skv)
    expected = scaled_dot_product_attention(*tensors, attn_mask=kept, enable_gqa=True)
    assert_same_gradients(attend(*tensors, **options), expected, tensors)


@each_group
@pytest.mark.parametrize("root", [False, True], ids=["distance", "root"])
@pytest.mark.parametrize("start", [(0, 0), (5, 40)])
def test_alibi(root: bool, start: tuple[int, int], key_heads: int) -> None:
    """Slopes, made by the kernel from positions, are what a score_mod computes."""
    s = 70
    q, k, v = qkv(s, s, key_heads)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (j + start[1] - i - start[0]).abs().double()
        return score - slopes.double()[h] * (distance.sqrt() if root else distance)

    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, s, s, device="cpu")
    expected = flex_attention(q, k, v, score_mod=alibi, block_mask=mask, enable_gqa=True)
    actual = attend(
        q, k, v, sparse_mode=3, pse_shift=slopes, pse_type=3 if root else 2,
        q_start_idx=[start[0]], kv_start_idx=[start[1]],
    )  # fmt: skip
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("shape", [(B, N, 9, 14), (1, N, 9, 14), (B, N, 1, 14)], ids=str)
@pytest.mark.parametrize("pse_type", [0, 1])
def test_pse_shift_is_an_additive_mask(pse_type: int, shape: tuple[int, ...]) -> None:
    """Behind the scale, or before it; with the gradient that torch gives such a mask."""
    tensors = [x.requires_grad_() for x in (*qkv(9, 14), torch.randn(shape, dtype=torch.float64))]
    q, k, v, pse = tensors
    bias = pse * D**-0.5 if pse_type == 1 else pse
    expected = scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(B, N, 9, 14))
    assert_same_gradients(attend(q, k, v, pse_shift=pse, pse_type=pse_type), expected, tensors)


@pytest.mark.parametrize("mode", [0, 2, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_pse_of_1024_rows(mode: int, batch: int) -> None:
    """Values of the distance alone, of which the last rows are stored: ALiBi of flex_attention."""
    s = 1500
    q, k, v = (x[..., :8] for x in qkv(s, s))
    i, j = torch.arange(s)[:, None], torch.arange(s)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.3, 0.2, 0.1, 0.05]).double()
    slopes = slopes.view(2, N)[:batch]
    full = -slopes[..., None, None] * (i - j).abs()

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[b % batch, h] * (i - j).abs()

    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, s, s, device="cpu")
    expected = flex_attention(q, k, v, score_mod=alibi, block_mask=mask)
    causal = {"atten_mask": i < j} if mode == 0 else {}
    results = []
    for pse in (full[:, :, -1024:].contiguous(), full):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, sparse_mode=mode, pse_shift=pse, pse_type=0, **causal)
        torch.testing.assert_close(out, expected)
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    torch.testing.assert_close(*results)
