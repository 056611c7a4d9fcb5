"""Sinks of npu_fusion_attention on the CPU against attention in plain torch, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attention import attention, causal, from_layout, to_layout
from support.npu_names import SQUARE, torch_npu
from torch import Tensor
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, NK, SQ, SKV, D, DV, DR = 2, 4, 2, 7, 5, 8, 6, 4
each_version = pytest.mark.parametrize("version", ["", "_v2", "_v3"])


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def inputs() -> list[Tensor]:
    """query, key and value as (B, N, S, D), and a sink."""
    torch.manual_seed(0)
    return [drawn(B, N, SQ, D), drawn(B, NK, SKV, D), drawn(B, NK, SKV, DV), drawn(N)]


def assert_as_stated(out: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    assert_close(out, expected)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    found, wanted = (torch.autograd.grad(x, tensors, weight) for x in (out, expected))
    assert_close(found, wanted)


@each_version
@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
def test_forward_and_gradients(version: str, layout: str) -> None:
    """The first queries see no key, as there are more queries than keys."""
    tensors = inputs()
    given = [to_layout(x, layout) for x in tensors[:3]]
    out, maximum, total, *_ = getattr(torch_npu, f"npu_fusion_attention{version}")(
        *given, N, layout, scale=0.3, sink=tensors[3], atten_mask=SQUARE, sparse_mode=3
    )
    expected, lse = attention(*tensors[:3], causal(SQ, SKV), scale=0.3, sink=tensors[3])
    assert_as_stated(from_layout(out, layout, N), expected, tensors)
    assert_close(maximum[..., 0] + total[..., 0].log(), lse)


@each_version
def test_packed_sequences_and_windows(version: str) -> None:
    torch.manual_seed(0)
    q_ends, k_ends = [3, 3, 8], [4, 6, 11]
    tensors = [drawn(8, N, D), drawn(11, NK, D), drawn(11, NK, DV), drawn(N)]
    lengths: Any = map(torch.tensor, (q_ends, k_ends)) if version == "_v3" else (q_ends, k_ends)
    token = "tokens" if version == "_v2" else "tockens"
    out = getattr(torch_npu, f"npu_fusion_attention{version}")(
        *tensors[:3], N, "TND", atten_mask=SQUARE, sparse_mode=4, sink=tensors[3],
        **dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), lengths, strict=True)),
        **{f"pre_{token}": 2, f"next_{token}": 0},
    )[0]  # fmt: skip
    parts = []
    for q0, q1, k0, k1 in ((0, 3, 0, 4), (3, 3, 4, 6), (3, 8, 6, 11)):
        q, k, v = tensors[0][q0:q1], tensors[1][k0:k1], tensors[2][k0:k1]
        near = causal(q1 - q0, k1 - k0).triu(k1 - k0 - (q1 - q0) - 2)
        batch = [x.transpose(0, 1)[None] for x in (q, k, v)]
        parts.append(attention(*batch, near, sink=tensors[3])[0][0].transpose(0, 1))
    assert_as_stated(out, torch.cat(parts), tensors)


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
def test_beside_ropes(layout: str) -> None:
    tensors = [*inputs(), drawn(B, N, SQ, DR), drawn(B, NK, SKV, DR)]
    sink = tensors[3]
    query_rope, key_rope = (to_layout(x, layout) for x in tensors[4:])
    out = torch_npu.npu_fusion_attention_v2(
        *(to_layout(x, layout) for x in tensors[:3]), N, layout, query_rope=query_rope,
        key_rope=key_rope, scale=0.3, sink=sink,
    )[0]  # fmt: skip
    wide = [torch.cat((tensors[i], tensors[4 + i]), -1) for i in (0, 1)]
    expected = attention(*wide, tensors[2], scale=0.3, sink=sink)[0]
    assert_as_stated(from_layout(out, layout, N), expected, tensors)


@each_version
def test_the_gradient_by_its_operator(version: str) -> None:
    """With dropout, whose mask the gradient draws again, and a bias."""
    tensors, pse = inputs(), drawn(B, N, SQ, SKV)
    forward = getattr(torch_npu, f"npu_fusion_attention{version}")
    backward = getattr(torch_npu, f"npu_fusion_attention_grad{version}")
    torch.manual_seed(3)
    out, maximum, total, softmax, *drawn_by = forward(
        *tensors[:3], N, "BNSD", pse=pse, sink=tensors[3], keep_prob=0.7
    )
    names = ("seed", "offset", "numels")[: len(drawn_by)]
    *first, last = backward(
        *(x.detach() for x in tensors[:3]), torch.ones_like(out), N, "BNSD", keep_prob=0.7,
        pse=pse.detach(), softmax_max=maximum, softmax_sum=total, softmax_in=softmax,
        attention_in=out.detach(), sink=tensors[3].detach(),
        **dict(zip(names, drawn_by, strict=True)),
    )  # fmt: skip
    expected = torch.autograd.grad(out.sum(), [*tensors[:3], pse, tensors[3]])
    assert_close([*first[:4], last], list(expected), rtol=0, atol=0)


def test_without_a_sink_its_gradient_is_empty() -> None:
    *tensors, _ = (x.detach() for x in inputs())
    out, maximum, total, *_ = torch_npu.npu_fusion_attention(*tensors, N, "BNSD")
    results = torch_npu.npu_fusion_attention_grad(
        *tensors, out, N, "BNSD", softmax_max=maximum, softmax_sum=total, attention_in=out
    )
    assert results[4].shape == (0,)
    assert results[4].dtype == torch.float32


@each_version
def test_wrong_sinks(version: str) -> None:
    query, key = torch.randn(B, N, SQ, D), torch.randn(B, NK, SKV, D)
    for sink, kind, message in (
        (torch.zeros(NK), ValueError, r"sink: expected shape \(4\)"),
        (torch.zeros(N).bfloat16(), TypeError, "sink: expected dtype float32, got bfloat16"),
    ):
        with pytest.raises(kind, match=message):
            getattr(torch_npu, f"npu_fusion_attention{version}")(
                query, key, key, N, "BNSD", sink=sink
            )


@pytest.mark.parametrize("version", ["_v2", "_v3"])
def test_compiles(version: str) -> None:
    tensors = [x.detach().float() for x in inputs()]
    function = getattr(torch_npu, f"npu_fusion_attention{version}")

    def call(*x: Tensor) -> Tensor:
        return function(*x[:3], N, "BNSD", scale=0.3, sink=x[3])[0]

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    results = []
    for step in (compiled, call):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = step(*leaves)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    assert all(map(torch.equal, *results))
