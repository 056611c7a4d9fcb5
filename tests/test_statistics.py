"""Softmax statistics: gradients through them, their log-sum-exp, their order in packs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.gradients import differentiable_names
from ascend_attn_check.samples.sparse import SparseCase
from ascend_attn_check.samples.sparse_flash_attention import SPARSE_FLASH_ATTENTION
from ascend_attn_check.samples.sparse_flash_mla import SPARSE_FLASH_MLA, MlaCase
from ascend_attn_ops import reference
from ascend_attn_ops._core.statistics import by_head, by_sequence
from support.attention import to_layout
from support.samples import Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

PACK = ((4, 0, 3), (3, 2, 6))  # with rows without keys
ATTENTION = [SparseCase(s=(6, 5), d=4, heads=2, k=3), SparseCase(layout="TND", lengths=PACK, d=4)]
MLA = [
    MlaCase(kind="swa", s=(6, 5, 0), d=4), MlaCase(kind="hca", s=(6, 5, 2), d=4, sink=False),
    MlaCase(layout="TND", lengths=(*PACK, (1, 1, 3)), tail=(2, 1, 1), d=4),
]  # fmt: skip


def made(case: SparseCase | MlaCase, dtype: torch.dtype = torch.float64) -> Sample:
    operator = SPARSE_FLASH_MLA if isinstance(case, MlaCase) else SPARSE_FLASH_ATTENTION
    return operator.make(case, dtype)


def of_statistics(outputs: tuple[Tensor, ...]) -> Tensor:
    """A function of the log-sum-exp of each row that has keys."""
    lse = outputs[1] if len(outputs) == 2 else ops.log_sum_exp(*outputs[1:])
    weights = torch.arange(lse.numel(), device=lse.device).view(lse.shape)
    return (lse.masked_fill(lse.isinf(), 0) * weights).sum()


def both(outputs: tuple[Tensor, ...]) -> Tensor:
    return of_statistics(outputs) + outputs[0].square().sum()


def gradients(sample: Sample, of: Callable[..., Tensor], operators: Any = torch.ops.ascend) -> Any:
    names = differentiable_names(sample)
    leaf = sample.requires_grad(names)
    leaves = [leaf.tensors[name] for name in names]
    return torch.autograd.grad(
        of(leaf.call(operators)), leaves, allow_unused=True, materialize_grads=True
    )


@pytest.mark.parametrize("of", [of_statistics, both])
@pytest.mark.parametrize("case", [*ATTENTION, *MLA], ids=lambda case: case.id)
def test_gradients_are_those_of_the_reference(
    case: SparseCase | MlaCase, of: Callable[..., Tensor]
) -> None:
    sample = made(case)
    expected = gradients(sample, of, reference)
    torch.testing.assert_close(gradients(sample, of), expected, rtol=1e-9, atol=1e-9)
    rounded = gradients(made(case, torch.bfloat16), of)
    for x, y in zip(rounded, gradients(made(case, torch.bfloat16).double(), of), strict=True):
        assert (x - y).norm() <= 0.02 * y.norm()


@pytest.mark.parametrize("case", [ATTENTION[0], MLA[0]], ids=lambda case: case.id)
def test_compiled(case: SparseCase | MlaCase) -> None:
    sample = made(case)
    names = differentiable_names(sample)

    def call(*tensors: Tensor) -> Tensor:
        return both(sample.replace(**dict(zip(names, tensors, strict=True))).call(torch.ops.ascend))

    leaves = [sample.tensors[name].detach().clone().requires_grad_() for name in names]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    found = torch.autograd.grad(compiled(*leaves), leaves)
    torch.testing.assert_close(found, gradients(sample, both), rtol=0, atol=0)


def test_shapes_on_meta() -> None:
    sample = made(MLA[1]).to("meta")
    shapes = [sample.tensors[name].shape for name in differentiable_names(sample)]
    assert [x.shape for x in gradients(sample, both)] == shapes
    out, lse = sample.call(torch.ops.ascend)
    call = sample.of_gradient(d_out=out, out=out, softmax_lse=lse).given(d_softmax_lse=lse[..., 1:])
    with pytest.raises(ValueError, match=r"sparse_flash_mla_grad: d_softmax_lse: expected shape"):
        call.call(torch.ops.ascend)


def mla(query: Tensor, kv: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    return ops.sparse_flash_mla(query, kv, scale_value=0.3, sink=sink, ori_mask_mode=0)


def attention(query: Tensor, kv: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    indices = torch.arange(kv.shape[1], dtype=torch.int32)
    out, *statistics = ops.sparse_flash_attention(
        query, kv, kv, indices.expand(1, query.shape[1], 1, -1), scale_value=0.3, sparse_mode=0
    )
    return out, ops.log_sum_exp(*statistics)


def dense(query: Tensor, kv: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    value = kv.flip(-1)
    out, *statistics = ops.flash_attention_score(query, kv, value, num_heads=4, layout="BSND")
    return out, ops.log_sum_exp(*statistics)[..., 0].transpose(1, 2)


PARTS = [(4, 5), (0, 9), (3, 3, 3)]


@pytest.mark.parametrize(
    ("attend", "key_heads", "parts"),
    [
        *itertools.product([mla], [1], PARTS[::2]),  # its log-sum-exp of no keys is 0
        *itertools.product([attention], [1], PARTS), *itertools.product([dense], [1, 4], PARTS),
    ],
)  # fmt: skip
def test_merged_parts_have_the_gradients_of_the_whole(
    attend: Callable[..., Any], key_heads: int, parts: tuple[int, ...]
) -> None:
    query, kv, sink, d_out = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 6, 4, 8), (1, 9, key_heads, 8), (4,), (1, 6, 4, 8))
    )
    leaves = [query, kv, sink] if attend is mla else [query, kv]
    last, *others = kv.split(parts, 1)[::-1]
    results = [attend(query, last, sink), *(attend(query, x, None) for x in others)]
    outs, lses = zip(*((out.flatten(0, 2), lse.flatten()) for out, lse in results), strict=True)
    merged, merged_lse = ops.attention_update(lses, outs)
    out, lse = attend(query, kv, sink)
    torch.testing.assert_close(merged.view_as(out), out)
    torch.testing.assert_close(merged_lse.view_as(lse), lse)
    torch.testing.assert_close(
        torch.autograd.grad(merged, leaves, d_out.view_as(merged)),
        torch.autograd.grad(out, leaves, d_out),
    )


# Dense attention.

B, N, NK, SQ, SKV, D, DR = 2, 2, 1, 3, 2, 2, 1
DENSE_PACK = {"actual_seq_lengths_query": [2, 6], "actual_seq_lengths_key": [3, 4]}
PADDED = {"actual_seq_lengths_query": [3, 1], "actual_seq_lengths_key": [1, 2]}
EXTRAS = {"plain": {}, "causal": {"sparse_mode": 3}, "band": {"sparse_mode": 4, "pre_tokens": 1}}


def leaves(layout: str, ropes: bool, sink: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (to_layout(x, layout) if len(shape) == 4 else x).requires_grad_()

    made = {"query": leaf(B, N, SQ, D), "key": leaf(B, NK, SKV, D), "value": leaf(B, NK, SKV, D)}
    if ropes:
        made |= {"query_rope": leaf(B, N, SQ, DR), "key_rope": leaf(B, NK, SKV, DR)}
    return made | ({"sink": leaf(N)} if sink else {})


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize(("ropes", "sink"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("layout", "lengths"), [("BNSD", {}), ("BSH", PADDED), ("SBH", PADDED), ("TND", DENSE_PACK)]
)
def test_gradcheck(
    layout: str, lengths: dict[str, Any], ropes: bool, sink: bool, extras: str
) -> None:
    """GQA, and rows without keys."""
    given = leaves(layout, ropes, sink)

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, maximum, total = ops.flash_attention_score(
            **dict(zip(given, tensors, strict=True)), num_heads=N, layout=layout, **lengths,
            **EXTRAS[extras],
        )  # fmt: skip
        lse = ops.log_sum_exp(maximum, total)[..., 0]
        return out, lse.masked_fill(lse.isinf(), 0)

    assert torch.autograd.gradcheck(function, list(given.values()))


def test_nothing_flows_through_sums_of_rows_without_keys() -> None:
    query, key = (torch.randn(1, s, 1, 4, requires_grad=True) for s in (3, 2))
    total = ops.flash_attention_score(query, key, key, num_heads=1, layout="BSND", sparse_mode=3)[2]
    gradients = torch.autograd.grad(total.sum(), (query, key))
    assert all(x.isfinite().all() for x in gradients)


# The log-sum-exp itself, and packs.

FLT_MAX = torch.finfo(torch.float32).max


def test_on_paper() -> None:
    """exp(2) * 3 is the sum of the exponentials; two rows have no key."""
    softmax_max = torch.tensor([2.0, 0.0, 0.0, -FLT_MAX, -1e30])
    lse = ops.log_sum_exp(softmax_max, torch.tensor([3.0, 1.0, 0.0, FLT_MAX, 1.0]))
    expected = torch.tensor([2 + math.log(3), 0.0, -math.inf, -math.inf, -1e30])
    torch.testing.assert_close(lse, expected, rtol=1e-7, atol=0)
    assert lse.dtype == torch.float32


def test_gradients_on_paper() -> None:
    """1 and 1 / sum; nothing depends on a row without keys."""
    softmax_max = torch.tensor([2.0, 0.0, -FLT_MAX], requires_grad=True)
    softmax_sum = torch.tensor([4.0, 0.0, FLT_MAX], requires_grad=True)
    lse = ops.log_sum_exp(softmax_max, softmax_sum)
    gradients = torch.autograd.grad(lse, (softmax_max, softmax_sum), torch.ones(3))
    assert [x.tolist() for x in gradients] == [[1.0, 0.0, 0.0], [0.25, 0.0, 0.0]]


def test_compiled_and_without_values() -> None:
    statistics = torch.randn(2, 5, 4, 8), torch.rand(2, 5, 4, 8)
    torch._dynamo.reset()
    compiled = torch.compile(ops.log_sum_exp, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*statistics), ops.log_sum_exp(*statistics))
    assert ops.log_sum_exp(*(x.to("meta") for x in statistics)).shape == (2, 5, 4, 8)


@pytest.mark.parametrize("ends", [[3, 5, 9], [3, 3, 7], [3, 5, 0], [0]])
def test_the_order_of_packs(ends: list[int]) -> None:
    """Packs hold (N, length) of each sequence. After a closing 0, the rest is one sequence."""
    tokens, heads = 9, 2
    number = torch.arange(heads * tokens).view(heads, tokens)  # head * 9 + token
    bounds = [0, *(end for end in ends if end), tokens]
    pieces = [number[:, a:b].flatten() for a, b in itertools.pairwise(bounds)]
    stored = torch.cat(pieces).view(tokens, heads)
    assert torch.equal(by_head(stored, ends), number)
    assert torch.equal(by_sequence(number, ends), stored)
    lanes = stored[..., None].expand(-1, -1, 8)
    assert torch.equal(by_sequence(by_head(lanes, ends), ends), lanes)
