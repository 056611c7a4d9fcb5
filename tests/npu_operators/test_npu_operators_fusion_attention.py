"""npu_fusion_attention on the CPU against plain torch, with gradients, dropout and sinks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.attention import attention, causal, from_layout, to_layout
from support.npu_names import SQUARE, torch_npu
from torch import Tensor
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, NK, SQ, SKV, D, DV = 2, 4, 2, 5, 7, 8, 6
each_layout = pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
each_version = pytest.mark.parametrize(
    "name", ["npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3"]
)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def inputs(queries: int = SQ, keys: int = SKV) -> list[Tensor]:
    """query, key and value as (B, N, S, D)."""
    torch.manual_seed(0)
    return [drawn(B, N, queries, D), drawn(B, NK, keys, D), drawn(B, NK, keys, DV)]


def assert_as_stated(out: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    assert_close(out, expected)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    found, wanted = (torch.autograd.grad(x, tensors, weight) for x in (out, expected))
    assert_close(found, wanted)


@each_version
@each_layout
@pytest.mark.parametrize("with_sink", [False, True])
def test_forward_and_gradients(name: str, layout: str, with_sink: bool) -> None:
    """With a sink the first queries see no key, as there are more queries than keys."""
    tensors, options, keep, sink = inputs(), {}, None, None
    if with_sink:
        sink, keep = drawn(N), causal(7, 5)
        tensors = [*inputs(7, 5), sink]
        options = {"sink": sink, "atten_mask": SQUARE, "sparse_mode": 3}
    given = [to_layout(x, layout) for x in tensors[:3]]
    out, maximum, total, *_ = getattr(torch_npu, name)(*given, N, layout, scale=0.3, **options)
    expected, lse = attention(*tensors[:3], keep, scale=0.3, sink=sink)
    assert_as_stated(from_layout(out, layout, N), expected, tensors)
    assert maximum.shape == (B, N, tensors[0].shape[2], 8)
    assert_close(maximum[..., 0] + total[..., 0].log(), lse)


def pre_and_next(name: str, before: int, after: int) -> dict[str, int]:
    tokens = "tokens" if name.endswith("v2") else "tockens"
    return {f"pre_{tokens}": before, f"next_{tokens}": after}


@each_version
def test_masks(name: str) -> None:
    tensors = inputs()
    function = getattr(torch_npu, name)
    out = function(*tensors, N, "BNSD", atten_mask=SQUARE, sparse_mode=3)[0]
    assert_as_stated(out, attention(*tensors, causal(SQ, SKV))[0], tensors)
    mask = torch.rand(B, 1, SQ, SKV) < 0.3
    i, j = torch.arange(SQ)[:, None], torch.arange(SKV)
    keep = ~mask & (j >= i - 2) & (j <= i + 1)
    for dtype in (torch.bool, torch.uint8):
        limits = pre_and_next(name, 2, 1)
        out = function(*tensors, N, "BNSD", atten_mask=mask.to(dtype), **limits)[0]
        assert_as_stated(out, attention(*tensors, keep)[0], tensors)


@each_version
@pytest.mark.parametrize("with_sink", [False, True])
def test_packed_sequences(name: str, with_sink: bool) -> None:
    """With a sink, in a window."""
    torch.manual_seed(0)
    q_ends, k_ends = [3, 3, 8], [4, 6, 11]
    tensors = [drawn(8, N, D), drawn(11, NK, D), drawn(11, NK, DV)]
    lengths: Any = (q_ends, k_ends)
    if name.endswith("v3"):
        lengths = map(torch.tensor, lengths)
    options: dict[str, Any] = {"sparse_mode": 3}
    sink = drawn(N) if with_sink else None
    if sink is not None:
        options = {"sparse_mode": 4, "sink": sink, **pre_and_next(name, 2, 0)}
        tensors.append(sink)
    out = getattr(torch_npu, name)(
        *tensors[:3], N, "TND", atten_mask=SQUARE, **options,
        **dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), lengths, strict=True)),
    )[0]  # fmt: skip
    parts = []
    for q0, q1, k0, k1 in ((0, 3, 0, 4), (3, 3, 4, 6), (3, 8, 6, 11)):
        q, k, v = tensors[0][q0:q1], tensors[1][k0:k1], tensors[2][k0:k1]
        keep = causal(q1 - q0, k1 - k0)
        if with_sink:
            keep = keep.triu(k1 - k0 - (q1 - q0) - 2)
        batch = [x.transpose(0, 1)[None] for x in (q, k, v)]
        parts.append(attention(*batch, keep, sink=sink)[0][0].transpose(0, 1))
    assert_as_stated(out, torch.cat(parts), tensors)


@each_version
@pytest.mark.parametrize("ends", [[3, 3, 8], [2, 7, 0]])
def test_statistics_in_the_order_of_tokens(name: str, ends: list[int]) -> None:
    """In the second pack, one token is behind the sequences; a 0 closes the lengths."""
    torch.manual_seed(0)
    tensors = [drawn(8, N, D), drawn(8, NK, D), drawn(8, NK, DV)]
    lengths: Any = torch.tensor(ends) if name.endswith("v3") else ends
    pack = {"softmax_layout": "TND", "actual_seq_qlen": lengths, "actual_seq_kvlen": lengths}
    out, maximum, total, softmax, *_ = getattr(torch_npu, name)(*tensors, N, "TND", **pack)
    outs, rows = [], []
    for begin, end in itertools.pairwise([0, *(x for x in ends if x)]):
        batch = [x[begin:end].transpose(0, 1)[None] for x in tensors]
        of_sequence, lse = attention(*batch)
        outs.append(of_sequence[0].transpose(0, 1))
        rows.append(lse[0].T)
    last = max(ends)
    assert_close((maximum + total.log())[:last], torch.cat(rows)[..., None].expand(-1, -1, 8))
    assert maximum.is_contiguous()
    weight = torch.randn(last, N, DV, dtype=torch.float64)
    expected = torch.autograd.grad(torch.cat(outs), tensors, weight, retain_graph=True)
    by_autograd = torch.autograd.grad(out[:last], tensors, weight, retain_graph=True)
    dy = torch.nn.functional.pad(weight, (0, 0, 0, 0, 0, 8 - last))
    by_operator = getattr(torch_npu, name.replace("attention", "attention_grad"))(
        *(x.detach() for x in tensors), dy, N, "TND", **pack, softmax_in=softmax,
        softmax_max=maximum, softmax_sum=total, attention_in=out.detach(),
    )  # fmt: skip
    assert_close(by_autograd, expected)
    assert_close(by_operator[:3], expected)


@pytest.mark.parametrize(
    ("name", "options", "factor"),
    [
        ("npu_fusion_attention", {}, 0.5),
        ("npu_fusion_attention_v2", {}, 0.5),
        ("npu_fusion_attention_v2", {"pse_type": 0}, 1),
        ("npu_fusion_attention_v3", {}, 0.5),
    ],
)
def test_a_bias_before_the_scale_or_behind_it(
    name: str, options: dict[str, int], factor: float
) -> None:
    pse = drawn(B, N, SQ, SKV)
    tensors = [*inputs(), pse]
    out = getattr(torch_npu, name)(*tensors[:3], N, "BNSD", pse=pse, scale=0.5, **options)[0]
    assert_as_stated(out, attention(*tensors[:3], scale=0.5, bias=pse * factor)[0], tensors)


@each_layout
@pytest.mark.parametrize("with_sink", [False, True])
def test_ropes_are_further_channels(layout: str, with_sink: bool) -> None:
    tensors = [*inputs(), drawn(B, N, SQ, 4), drawn(B, NK, SKV, 4)]
    sink = drawn(N) if with_sink else None
    q, k, v, q_rope, k_rope = (to_layout(x, layout) for x in tensors)
    out, maximum, total, *_ = torch_npu.npu_fusion_attention_v2(
        q, k, v, N, layout, query_rope=q_rope, key_rope=k_rope, scale=0.3, sink=sink
    )
    wide = [torch.cat((tensors[i], tensors[3 + i]), -1) for i in (0, 1)]
    expected = attention(*wide, tensors[2], scale=0.3, sink=sink)[0]
    leaves = [*tensors, *([] if sink is None else [sink])]
    wanted = torch.autograd.grad(expected.sum(), leaves, retain_graph=True)
    assert_as_stated(from_layout(out, layout, N), expected, leaves)
    dq, dk, dv, _, dq_rope, dk_rope, d_sink = torch_npu.npu_fusion_attention_grad_v2(
        *(x.detach() for x in (q, k, v)), torch.ones_like(out), N, layout, scale_value=0.3,
        query_rope=q_rope.detach(), key_rope=k_rope.detach(), softmax_max=maximum,
        softmax_sum=total, attention_in=out.detach(), sink=None if sink is None else sink.detach(),
    )  # fmt: skip
    found = (dq, dk, dv, dq_rope, dk_rope)
    assert_close(found, tuple(to_layout(x, layout) for x in wanted[:5]))
    if with_sink:
        assert_close(d_sink, wanted[5])


def bits(mask: Tensor, scores: int) -> Tensor:
    """Unpacks a mask to (B, N, Sq, Skv), the lowest bit of a byte first."""
    unpacked = (mask[:, None] >> torch.arange(8)) & 1
    return unpacked.flatten()[:scores].view(B, N, SQ, SKV).bool()


def test_a_dropout_mask() -> None:
    tensors = inputs()
    scores = B * N * SQ * SKV
    mask = torch.randint(256, (-(-scores // 128) * 16,), dtype=torch.uint8)
    results = torch_npu.npu_fusion_attention(
        *tensors, N, "BNSD", keep_prob=0.5, dropout_mask=mask, seed=5, offset=7
    )
    assert results[4:] == (5, 7, scores)
    *_, softmax, seed, offset, numels = torch_npu.npu_fusion_attention(*tensors, N, "BNSD")
    assert softmax.shape == (0,)
    assert (seed, offset, numels) == (0, 0, scores)  # without dropout
    expected = attention(*tensors, weight=bits(mask, scores) / 0.5)[0]
    assert_as_stated(results[0], expected, tensors)


@each_version
@pytest.mark.parametrize("with_sink", [False, True])
def test_the_gradient_draws_the_mask_again(name: str, with_sink: bool) -> None:
    """With a sink, beside a bias."""
    tensors, more = inputs(), {}
    if with_sink:
        more = {"pse": drawn(B, N, SQ, SKV), "sink": drawn(N)}
    forward = getattr(torch_npu, name)
    backward = getattr(torch_npu, name.replace("attention", "attention_grad"))
    torch.manual_seed(3)
    out, maximum, total, softmax, *drawn_by = forward(*tensors, N, "BNSD", keep_prob=0.7, **more)
    names = ("seed", "offset", "numels")[: len(drawn_by)]
    *first, last = backward(
        *(x.detach() for x in tensors), torch.ones_like(out), N, "BNSD", keep_prob=0.7,
        softmax_max=maximum, softmax_sum=total, softmax_in=softmax, attention_in=out.detach(),
        **dict(zip(names, drawn_by, strict=True)), **{k: x.detach() for k, x in more.items()},
    )  # fmt: skip
    found = [*first[:4], last] if with_sink else first[:3]
    expected = torch.autograd.grad(out.sum(), [*tensors, *more.values()])
    assert_close(found, list(expected), rtol=0, atol=0)
    torch.manual_seed(3)
    assert torch.equal(forward(*tensors, N, "BNSD", keep_prob=0.7, **more)[0], out)
    assert not torch.equal(forward(*tensors, N, "BNSD", keep_prob=0.7, **more)[0], out)


def test_the_masks_are_random() -> None:
    """The weights of equal scores show the mask: each is 0 or 1 / (Skv * keep_prob)."""
    query, keys = torch.zeros(1, 8, 256, 16), torch.zeros(1, 8, 256, 16)
    value = torch.eye(256).expand(1, 8, 256, 256)[..., :16].contiguous()
    torch.manual_seed(0)
    first, second = (
        torch_npu.npu_fusion_attention(query, keys, value, 8, "BNSD", keep_prob=0.75)[0] > 0
        for _ in range(2)
    )
    # Standard deviation of the mean of 32768 bits: 0.0024.
    for share, expected in (
        (first, 0.75), (second, 0.75), (first & second, 0.75**2),
        (first[..., 1:] & first[..., :-1], 0.75**2),
        (first[:, :, 1:] & first[:, :, :-1], 0.75**2),
    ):  # fmt: skip
        assert abs(share.float().mean() - expected) < 0.012
