"""npu_fusion_attention, _v2 and _v3 of torch_npu with packed sequences (TND), and two options that
only TND has: ropes, and statistics in the order of the tokens."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import cann_simulator
import pytest
import torch
import torch_npu
from plain_attention import TOLERANCES, attention, compressed_mask, kept_by_mode, statistics, values
from support.tolerance import assert_close
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_leak")

SCALE = 0.25
N, NK, D, ROPE = 4, 2, 16, 8
QUERIES, KEYS = [5, 1, 8, 3], [9, 1, 8, 17]
V1, V2, V3 = (
    torch_npu.npu_fusion_attention,
    torch_npu.npu_fusion_attention_v2,
    torch_npu.npu_fusion_attention_v3,
)
each_operator = pytest.mark.parametrize("operator", [V1, V2, V3], ids=["v1", "v2", "v3"])


def lengths_for(operator: Any, queries: list[int], keys: list[int]) -> dict[str, Any]:
    """Ends of the sequences: lists, which v3 wants as tensors."""
    both = {"actual_seq_qlen": queries, "actual_seq_kvlen": keys}
    ends = {name: list(accumulate(x)) for name, x in both.items()}
    return {name: torch.tensor(x) for name, x in ends.items()} if operator is V3 else ends


def sequences(x: Tensor, lengths: list[int]) -> list[Tensor]:
    """(T, N, D) as (1, N, S, D) each."""
    ends = [0, *accumulate(lengths)]
    return [x[begin:end].transpose(0, 1)[None] for begin, end in pairwise(ends)]


def packed(parts: list[Tensor]) -> Tensor:
    return torch.cat([x[0].transpose(0, 1) for x in parts])


def check(
    operator: Any,
    dtype: torch.dtype,
    options: dict[str, Any],
    kept: list[Tensor | None] | None = None,
    queries: list[int] = QUERIES,
    keys: list[int] = KEYS,
    with_sinks: bool = False,
    with_ropes: bool = False,
    sizes: tuple[int, int] = (D, ROPE),
) -> None:
    tq, tk, (d, rope) = sum(queries), sum(keys), sizes
    shapes = [(tq, N, d), (tk, NK, d), (tk, NK, d)]
    if with_ropes:
        shapes += [(tq, N, rope), (tk, NK, rope)]
        # A2 and A3 take ropes beside a mask alone.
        options = {"sparse_mode": 3, "atten_mask": compressed_mask(3).npu(), **options}
        kept = of_mode(3, queries, keys, 0, 0)
    rounded = [values(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    names = ["q", "k", "v", "query_rope", "key_rope"][: len(rounded)]
    if with_sinks:
        rounded.append(values(N, seed=8).float())
        names.append("sink")
    dy = values(tq, N, d, seed=9).to(dtype)

    exact = [x.double().requires_grad_() for x in rounded]
    plain = dict(zip(names, exact, strict=True))
    if with_ropes:
        plain["q"] = torch.cat([plain["q"], plain["query_rope"]], -1)
        plain["k"] = torch.cat([plain["k"], plain["key_rope"]], -1)
    triples = zip(
        sequences(plain["q"], queries),
        sequences(plain["k"], keys),
        sequences(plain["v"], keys),
        kept or [None] * len(queries),
        strict=True,
    )
    outs, tops, totals = [], [], []
    for q, k, v, mask in triples:
        given = {"scale": SCALE, "kept": mask, "sinks": plain.get("sink")}
        outs.append(attention(q, k, v, **given))
        _, top, total = statistics(q, k, **given)
        tops.append(top)
        totals.append(total)
    expected = packed(outs)
    gradients = torch.autograd.grad(expected, exact, dy.double())

    on_npu = [x.npu().requires_grad_() for x in rounded]
    rest = dict(zip(names[3:], on_npu[3:], strict=True))
    ends = lengths_for(operator, queries, keys)
    results = operator(*on_npu[:3], N, "TND", scale=SCALE, **ends, **rest, **options)
    actual = torch.autograd.grad(results[0], on_npu, dy.npu())
    assert_close("out", results[0].cpu(), expected, TOLERANCES[dtype])
    for name, x, y in zip(names, actual, gradients, strict=True):
        assert_close(f"gradient of {name}", x.cpu(), y, TOLERANCES[dtype])
    for name, x, parts in (("max", results[1], tops), ("sum", results[2], totals)):
        assert x.shape == (tq, N, 8)
        by_token = options.get("softmax_layout") == "TND"
        # Otherwise one sequence after the other.
        y = packed(parts) if by_token else torch.cat([x.flatten() for x in parts]).view(tq, N, 1)
        assert_close(name, x.cpu(), y.expand(x.shape), TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@each_operator
def test_packed(operator: Any, dtype: torch.dtype) -> None:
    check(operator, dtype, {})


def of_mode(mode: int, queries: list[int], keys: list[int], pre: int, next: int) -> list[Tensor]:
    """Modes 7 and 8 have a band in the last or the first sequence."""
    modes = [mode] * len(queries)
    if mode in (7, 8):
        modes = [mode - 4 if mode == 7 else 2] * len(queries)
        modes[-1 if mode == 7 else 0] = 4
    return [
        kept_by_mode(x, sq, skv, pre=pre, next=next)
        for x, sq, skv in zip(modes, queries, keys, strict=True)
    ]


@pytest.mark.parametrize(("mode", "pre", "next"), [(2, 0, 0), (3, 0, 0), (4, 6, 1), (7, 20, -2)])
@each_operator
def test_sparse_modes(operator: Any, mode: int, pre: int, next: int) -> None:
    tokens = "tokens" if operator is V2 else "tockens"
    options = {"sparse_mode": mode, "atten_mask": compressed_mask(mode).npu()}
    if next or pre:
        options |= {f"pre_{tokens}": pre, f"next_{tokens}": next}
    check(operator, torch.float16, options, of_mode(mode, QUERIES, KEYS, pre, next))


def test_sparse_mode_8() -> None:
    options = {"sparse_mode": 8, "atten_mask": compressed_mask(8).npu(), "pre_tockens": 9}
    queries, keys = [9, 4, 2], [9, 6, 2]
    kept = of_mode(8, queries, keys, 9, 1)
    check(V1, torch.float16, options | {"next_tockens": 1}, kept, queries, keys)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_operator
def test_sinks(operator: Any, dtype: torch.dtype) -> None:
    check(operator, dtype, {"softmax_layout": "TND"}, with_sinks=True)


# _v2 heeds softmax_layout with sinks alone.
@pytest.mark.parametrize("operator", [V1, V3], ids=["v1", "v3"])
def test_statistics_in_the_order_of_tokens(operator: Any) -> None:
    check(operator, torch.float16, {"softmax_layout": "TND"})


@pytest.mark.parametrize("with_sinks", [False, True])
def test_ropes(with_sinks: bool) -> None:
    options = {"softmax_layout": "TND"} if with_sinks else {}
    check(V2, torch.bfloat16, options, with_ropes=True, with_sinks=with_sinks)


def test_functions_called() -> None:
    with cann_simulator.recorded_calls() as calls:
        check(V1, torch.float16, {})
        check(V2, torch.float16, {})
        check(V2, torch.bfloat16, {}, with_ropes=True)
        check(V1, torch.float16, {"softmax_layout": "TND"})
        check(V1, torch.float16, {"softmax_layout": "TND"}, with_sinks=True)
    prefix = "aclnnFlashAttention"
    names = [x["function"].removeprefix(prefix) for x in calls if x.get("phase") == 1]
    expected = []
    for version in ("", "V2", "V3", "V4", "V5"):
        expected += [f"VarLenScore{version}", f"UnpaddingScoreGrad{version}"]
    assert [x for x in names if "Score" in x] == expected


def test_dropout() -> None:
    """Bits stand as (N, S, S) of one sequence after the other."""
    keep = 0.5
    tq, tk = sum(QUERIES), sum(KEYS)
    bits = sum(N * sq * skv for sq, skv in zip(QUERIES, KEYS, strict=True))
    kept = torch.randint(0, 2, (-(-bits // 8) * 8,), generator=torch.Generator().manual_seed(0))
    mask = (kept.view(-1, 8) * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)
    rounded = [values(t, n, D, seed=t + n).half() for t, n in ((tq, N), (tk, NK), (tk, NK))]
    options = {"keep_prob": keep, "dropout_mask": mask.npu()} | lengths_for(V1, QUERIES, KEYS)
    out = V1(*(x.npu() for x in rounded), N, "TND", scale=SCALE, **options)[0]
    triples = zip(
        *(sequences(x.double(), y) for x, y in zip(rounded, (QUERIES, KEYS, KEYS), strict=True)),
        strict=True,
    )
    expected, begin = [], 0
    for q, k, v in triples:
        shape = (N, q.size(2), k.size(2))
        end = begin + N * q.size(2) * k.size(2)
        drop = kept[begin:end].view(shape) / keep
        expected.append(attention(q, k, v, scale=SCALE, drop=drop))
        begin = end
    assert_close("out", out.cpu(), packed(expected), TOLERANCES[torch.float16])
