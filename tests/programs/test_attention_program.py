"""ascend_attn_ops.attention in place of torch's scaled_dot_product_attention, in float64.

torch's test/test_transformers.py (commit 00030eb8) has 365 cases for its function on a CPU. 327
apply, and pass; 38 do not: 20 that draw torch's dropout mask, 16 about the choice of a backend, 2
that torch skips. The 13 calls without dropout among the samples of its OpInfo in torch 2.13 pass in
float32 and float64. The programs here vary the same: shapes, masks, dtypes, gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops.flash_attn import flash_attn_func
from support.attention import attention as by_definition
from support.attention import qkv
from support.turns import by_turns
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

SQ, SKV, D = 12, 20, 64
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
BOOL = {
    "of keys": (1, SKV), "of pairs": (SQ, SKV), "of heads": (4, SQ, SKV),
    "of padding": (2, 1, 1, SKV), "of all": (2, 4, SQ, SKV), "of queries": (2, 1, SQ, 1),
    "of heads' keys": (1, 4, 1, SKV), "of each head's keys": (2, 4, 1, SKV),
}  # fmt: skip
COMPILED = torch.compile(ops.attention, fullgraph=True, backend="aot_eager")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def calls() -> dict[str, tuple[list[Tensor], dict[str, Any]]]:
    """The tensors and options of calls that torch's function takes as well, by what they show."""
    dense = [random(2, 4, SQ, D), random(2, 4, SKV, D), random(2, 4, SKV, D)]
    grouped = [dense[0], random(2, 2, SKV, D), random(2, 2, SKV, D)]
    some: dict[str, Any] = {
        "nothing": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3},
        "negative scale": {"scale": -2.0},
        "infinite bias": {"attn_mask": torch.zeros(SQ, SKV).masked_fill(
            random(SQ, SKV) < 0.5, -torch.inf).index_fill(0, torch.tensor([3]), -torch.inf)},
        "no key": {"attn_mask": (random(SQ, SKV) < 0).index_fill(0, torch.tensor([3]), False)},
    }  # fmt: skip
    found = {name: (dense, options) for name, options in some.items()}
    for name, shape in BOOL.items():
        found[f"bool {name}"] = dense, {"attn_mask": random(*shape) < 0.5}
        found[f"bias {name}"] = dense, {"attn_mask": random(*shape)}
    return found | {
        "3 axes": ([x[:, 0] for x in dense], {"attn_mask": random(2, SQ, SKV)}),
        "2 axes": ([x[0, 0] for x in dense], {"is_causal": True}),
        "5 axes": ([x.expand(3, *x.shape) for x in dense], {"attn_mask": random(3, 1, 4, 1, SKV)}),
        "other batches": ([dense[0][0], *dense[1:]], {}),
        "no keys": ([dense[0], *(x[..., :0, :] for x in dense[1:])], {}),
        "other heads": ([dense[0][:, :1], *dense[1:]], {}),
        "one head": ([dense[0], grouped[1][:, :1], grouped[2][:, :1]], {"is_causal": True}),
        "groups": (grouped, {"enable_gqa": True, "is_causal": True}),
        "groups of 3 axes": ([x[0] for x in grouped], {"enable_gqa": True}),
        "smaller values": ([*dense[:2], dense[2][..., :32]], {"attn_mask": random(SQ, SKV) < 0.5}),
        "strides": ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense], {}),
    }  # fmt: skip


def assert_same(
    attend: Callable[..., Tensor], dtype: torch.dtype, tensors: list[Tensor],
    options: dict[str, Any], expect: Callable[..., Tensor],
) -> None:  # fmt: skip
    """Out and gradients, also of a bias and a sink, against what `expect` says in float64."""
    given = {**options, "query": tensors[0], "key": tensors[1], "value": tensors[2]}
    floats = [x for x, y in given.items() if isinstance(y, Tensor) and y.is_floating_point()]
    ours = given | {x: given[x].detach().to(dtype).requires_grad_() for x in floats}
    theirs = given | {x: ours[x].detach().double().requires_grad_() for x in floats}
    out = attend(**ours)
    expected = expect(**theirs)
    d_out = torch.randn(expected.shape, dtype=torch.float64).to(dtype)
    actual = out, *torch.autograd.grad(out, [ours[x] for x in floats], d_out)
    wanted = expected, *torch.autograd.grad(expected, [theirs[x] for x in floats], d_out.double())
    for name, x, y in zip(("out", *floats), actual, wanted, strict=True):
        assert (x.dtype, x.shape) == (dtype, y.shape)
        off, most = (float(a.detach().abs().max()) if a.numel() else 0 for a in (x.double() - y, y))
        assert off <= TOLERANCE[dtype] * max(most, 1), name


@by_turns(4)
@pytest.mark.parametrize("way", [*TOLERANCE, "compiled"], ids=str)
@pytest.mark.parametrize("name", calls())
def test_options_of_torch(name: str, way: Any) -> None:
    attend, dtype = (COMPILED, torch.float32) if way == "compiled" else (ops.attention, way)
    with ops.limits(None) if dtype == torch.float64 else nullcontext():
        assert_same(attend, dtype, *calls()[name], scaled_dot_product_attention)


def masks(sq: int, skv: int) -> dict[str, tuple[Any, Callable[..., Any]]]:
    """A mask or a window, and which key j a query i keeps in batch b. d: how far keys are ahead."""
    d = skv - sq
    prefix = torch.tensor([max(d, 0) + 1, skv - 1])
    return {
        "causal, upper left": (ops.Causal("top-left"), lambda b, i, j: j <= i),
        "causal, lower right": (ops.Causal(), lambda b, i, j: j <= i + d),
        "band, upper left": (
            ops.Band(3, 5, "top-left"), lambda b, i, j: (i - 3 <= j) & (j <= i + 5)
        ),
        "band, lower right": (ops.Band(4, 2), lambda b, i, j: (i + d - 4 <= j) & (j <= i + d + 2)),
        "band of all before": (ops.Band(None, 2), lambda b, i, j: j <= i + d + 2),
        "band before the diagonal": (
            ops.Band(6 + max(d, 0), -1 + min(d, 0)),
            lambda b, i, j: (i + d - 6 - max(d, 0) <= j) & (j <= i + d - 1 + min(d, 0)),
        ),
        "window": ((4, 0), lambda b, i, j: (i + d - 4 <= j) & (j <= i + d)),
        "window to the right": ((-1, 3), lambda b, i, j: j <= i + d + 3),
        "prefix": (ops.Prefix(prefix), lambda b, i, j: (j < prefix[b]) | (j <= i + d)),
        "prefix of all": (ops.Prefix(skv - 1), lambda b, i, j: (j < skv - 1) | (j <= i + d)),
        "bias, upper left": (causal_upper_left(sq, skv), lambda b, i, j: j <= i),
        "bias, lower right": (causal_lower_right(sq, skv), lambda b, i, j: j <= i + d),
    }  # fmt: skip


@by_turns(8)
@pytest.mark.parametrize("attend", ["eager", "compiled"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize(("sq", "skv"), [(12, 12), (7, 13), (13, 9), (70, 600)])
@pytest.mark.parametrize("name", masks(1, 1))
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.usefixtures("no_limits")
def test_masks(name: str, sq: int, skv: int, key_heads: int, attend: str) -> None:
    """With and without a sink; rows without keys are zero."""
    mask, rule = masks(sq, skv)[name]
    b, i, j = torch.arange(2)[:, None, None, None], torch.arange(sq)[:, None], torch.arange(skv)
    keep = rule(b, i, j).expand(2, 1, sq, skv)
    if isinstance(mask, ops.nn.masks.Mask):
        assert torch.equal(mask.dense(sq, skv).expand(2, 1, sq, skv), keep)
    given = "window" if isinstance(mask, tuple) else "attn_mask" if "bias" in name else "mask"
    attend_by = ops.attention if attend == "eager" else COMPILED
    for sink in ({}, {"sink": torch.randn(4)}):
        assert_same(
            # A bias of torch has no elements to cast.
            lambda **x: attend_by(**x, **{given: mask, "enable_gqa": True}), torch.float64,
            qkv(sq, skv, key_heads), sink,
            lambda **x: by_definition(**x, keep=keep, scale=16**-0.5)[0],
        )  # fmt: skip


@pytest.mark.parametrize("attend", ["eager", "compiled"])
@pytest.mark.parametrize("mask", [None, ops.Causal(), ops.Band(3, 0), ops.CutCausal(9, 0)], ids=str)
def test_packs(mask: Any, attend: str) -> None:
    """Within the limits of a device; each sequence has the result that it has alone."""
    ends, of_keys = [0, 5, 5, 12], [0, 9, 10, 18]
    tensors = [random(12, 4, D), random(18, 2, D), random(18, 2, D)]
    given: Any = {"cu_seqlens_q": torch.tensor(ends), "cu_seqlens_k": torch.tensor(of_keys)}
    call = torch.compile(ops.attention, fullgraph=True) if attend == "compiled" else ops.attention
    cut = [ops.Causal(), ops.Causal(), ops.Band(9, 0)]
    alone = cut if isinstance(mask, ops.CutCausal) else [mask] * 3

    def expect(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        outs = []
        for b in range(3):
            q = query[ends[b] : ends[b + 1]].transpose(0, 1)[None]
            k, v = (x[of_keys[b] : of_keys[b + 1]].transpose(0, 1)[None] for x in (key, value))
            keep = None if mask is None else alone[b].dense(q.shape[2], k.shape[2])
            outs.append(by_definition(q, k, v, keep, D**-0.5)[0][0].transpose(0, 1))
        return torch.cat(outs)

    given |= {"mask": mask, "enable_gqa": True}
    assert_same(call, torch.float32, tensors, given, expect)


def by_flash_attn(*given: Tensor, dropout_p: float) -> Tensor:
    return flash_attn_func(*(x.transpose(1, 2) for x in given), dropout_p).transpose(1, 2)


@pytest.mark.parametrize("attend", [ops.attention, by_flash_attn])
@pytest.mark.usefixtures("no_limits")
def test_dropout(attend: Callable[..., Tensor]) -> None:
    """The weights that are kept are larger by 1 / (1 - p), in the forward and in the gradients."""
    query, key, value = (random(2, 4, 64, 64).double() for _ in range(3))
    torch.manual_seed(3)
    kept = attend(query, key, torch.eye(64).expand_as(value).double(), dropout_p=0.5) > 0
    assert abs(float(kept.double().mean()) - 0.5) < 0.02
    torch.manual_seed(3)
    assert_same(
        lambda query, key, value: attend(query, key, value, dropout_p=0.5), torch.float64,
        [query, key, value], {},
        lambda **x: by_definition(**x, scale=64**-0.5, weight=kept * 2)[0],
    )  # fmt: skip


def test_autocast() -> None:
    """A bias of float32's least number is -inf in the region's dtype."""
    x = random(1, 2, SKV, D)
    bias = (random(SKV, SKV) < 0) * torch.finfo(torch.float32).min
    for inputs in ((x, x, x), (x, x.half(), x.bfloat16())):
        with torch.autocast("cpu", torch.bfloat16):
            out = ops.attention(*inputs, bias, 0.0, False)  # by position, as torch takes them
            theirs = scaled_dot_product_attention(*inputs, bias, 0.0, False)
        assert out.dtype == theirs.dtype
        torch.testing.assert_close(out, theirs, rtol=2**-6, atol=2**-6)


def test_wrong_calls() -> None:
    query, key, value = random(2, 4, 6, D), random(2, 4, 6, D), random(2, 4, 6, D)
    pack = {"query": query[0], "key": key[0], "value": value[0]}
    ends, keep = torch.tensor([0, 4]), torch.ones(6, 6, dtype=torch.bool)
    for error, text, changes in (
        (ValueError, "key: .* 4 heads .*enable_gqa=True, got 2", {"key": key[:, :2]}),
        (ValueError, "attn_mask: .* None beside is_causal", {"is_causal": True, "attn_mask": keep}),
        (ValueError, r"window: .*; window=\(left, 0\) is", {"is_causal": True, "window": (3, 0)}),
        (ValueError, "attn_mask: expected a shape that broadcasts", {"attn_mask": query[0, 0]}),
        (TypeError, "mask: expected Causal, Band", {"mask": keep}),
        (ValueError, "key: expected batches that broadcast", {"key": random(3, 4, 6, D)}),
        (ValueError, "cu_seqlens_q: .* 4, got 8 at 1 ", {**pack, "cu_seqlens_q": ends + ends}),
        (NotImplementedError, "attn_mask: expected None beside cu_seqlens_q",
            {"cu_seqlens_q": ends, "attn_mask": keep}),
        (ValueError, "align: expected 'bottom-right', where",
            {**pack, "cu_seqlens_q": ends, "mask": ops.Band(1, 1, "top-left")}),
    ):  # fmt: skip
        with pytest.raises(error, match=f"ascend::(attention|Band): {text}"):
            ops.attention(**{"query": query, "key": key, "value": value} | changes)
    with pytest.raises(ValueError, match=r"ascend::Causal: align: expected 'top-left' or .*'up'"):
        ops.Causal("up")  # type: ignore[arg-type]
    assert repr(ops.Band(3, 0)) == "Band(left=3, right=0, align='bottom-right')"
