"""npu_fusion_attention, _v2 and _v3 of torch_npu on the simulated NPU, forward and backward."""

from __future__ import annotations

from typing import Any

import cann_simulator
import pytest
import torch
import torch_npu
from plain_attention import TOLERANCES, attention, compressed_mask, kept_by_mode, statistics, values
from support.attention import from_layout, to_layout
from support.tolerance import assert_close
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_leak")

SCALE = 0.25
B, N, NK, SQ, SKV, D = 2, 4, 2, 9, 12, 16
V1, V2, V3 = (
    torch_npu.npu_fusion_attention,
    torch_npu.npu_fusion_attention_v2,
    torch_npu.npu_fusion_attention_v3,
)


def inputs(dtype: torch.dtype, sq: int = SQ, skv: int = SKV) -> list[Tensor]:
    """(B, N, S, D): query, key, value and the gradient of the output."""
    shapes = (B, N, sq, D), (B, NK, skv, D), (B, NK, skv, D), (B, N, sq, D)
    return [values(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().npu().requires_grad_() for x in tensors]


def compare(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    names = ("out", "dq", "dk", "dv", "dsink")[: len(expected)]
    for name, x, y in zip(names, actual, expected, strict=True):
        assert_close(name, x.cpu(), y, TOLERANCES[dtype])


def check_dense(
    operator: Any,
    layout: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    plain: dict[str, Any],
    lengths: tuple[int, int] = (SQ, SKV),
    sinks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The operator's results, after they and their gradients were compared with the plain ones."""
    q, k, v, dy = inputs(dtype, *lengths)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    given = leaves(*(to_layout(x, layout) for x in (q, k, v)))
    if sinks is not None:
        exact.append(sinks.double().requires_grad_())
        given += leaves(sinks)
        options, plain = options | {"sink": given[3]}, plain | {"sinks": exact[3]}
    out = attention(*exact[:3], scale=SCALE, **plain)
    gradients = torch.autograd.grad(out, exact, dy.double())
    results = operator(*given[:3], N, layout, scale=SCALE, **options)
    on_npu = torch.autograd.grad(results[0], given, to_layout(dy, layout).npu())
    back = [from_layout(x.cpu(), layout, n) for x, n in zip(on_npu, (N, NK, NK), strict=False)]
    actual = (from_layout(results[0].cpu(), layout, N), *back, *on_npu[3:])
    compare(actual, (out, *gradients), dtype)
    _, top, total = statistics(
        *exact[:2], scale=SCALE, **{x: y for x, y in plain.items() if x != "drop"}
    )
    for name, x, y in (("max", results[1], top), ("sum", results[2], total)):
        assert x.shape == (B, N, lengths[0], 8)
        assert_close(name, x.cpu(), y.expand(x.shape), TOLERANCES[torch.float32])
    return tuple(results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize("operator", [V1, V2, V3], ids=["v1", "v2", "v3"])
def test_layouts(operator: Any, layout: str, dtype: torch.dtype) -> None:
    check_dense(operator, layout, dtype, {}, {})


def called(calls: list[dict[str, Any]]) -> list[str]:
    return [x["function"] for x in calls if x.get("phase") == 1 and "Attention" in x["function"]]


def test_functions_called() -> None:
    sinks = values(N).float()
    with cann_simulator.recorded_calls() as calls:
        check_dense(V1, "BSH", torch.float16, {}, {})
        check_dense(V2, "BSH", torch.float16, {}, {})
        check_dense(V1, "BSH", torch.float16, {}, {}, sinks=sinks)
    name = "aclnnFlashAttentionScore"
    assert called(calls) == [name + x for x in ("", "Grad", "V2", "GradV2", "V3", "GradV3")]


@pytest.mark.parametrize("mode", range(7))
@pytest.mark.parametrize("operator", [V1, V3], ids=["v1", "v3"])
def test_sparse_modes(operator: Any, mode: int) -> None:
    options: dict[str, Any] = {"sparse_mode": mode}
    kept = values(B, 1, SQ, SKV, seed=9) > -0.5
    if mode >= 2:
        if mode == 4:
            options |= {"pre_tockens": 4, "next_tockens": 2}
        prefixes = [5, 9]
        if mode >= 5:
            options["prefix"] = prefixes
        kept = torch.stack(
            [kept_by_mode(mode, SQ, SKV, pre=4, next=2, prefix=x)[None] for x in prefixes]
        )
    if mode == 5:
        kept = kept.expand(B, 1, SQ, SKV)
    compressed = mode in (2, 3, 4, 6)
    options["atten_mask"] = (compressed_mask(mode) if compressed else ~kept).npu()
    check_dense(operator, "BNSD", torch.float16, options, {"kept": kept})


def test_window_of_mode_0() -> None:
    i, j = torch.arange(SQ).view(-1, 1), torch.arange(SKV)
    kept = (j >= i - 3) & (j <= i + 1)
    options = {"pre_tockens": 3, "next_tockens": 1, "atten_mask": kept.logical_not().npu()}
    check_dense(V1, "BSND", torch.bfloat16, options, {"kept": kept})


@pytest.mark.parametrize("rows", [SQ, 1])
def test_pse(rows: int) -> None:
    pse = values(B, N, rows, SKV, seed=7)
    for dtype in (torch.float16, torch.float32):
        rounded = pse.to(dtype)
        given = {"pse": rounded.npu()}
        check_dense(V1, "BSH", dtype, given, {"inner_bias": rounded.double()})
        after = given | {"pse_type": 0}
        check_dense(V2, "BSH", dtype, after, {"outer_bias": rounded.double()})


@pytest.mark.parametrize("pse_type", [2, 3])
def test_slopes(pse_type: int) -> None:
    slopes = values(N, seed=7).abs().float()
    distance = (torch.arange(SQ) + 2 - (torch.arange(SQ).view(-1, 1) + 1)).abs().double()
    bias = -slopes.double().view(-1, 1, 1) * (distance if pse_type == 2 else distance.sqrt())
    options = {"pse": slopes.npu(), "pse_type": pse_type, "q_start_idx": [1], "kv_start_idx": [2]}
    check_dense(V2, "BNSD", torch.float32, options, {"outer_bias": bias}, (SQ, SQ))


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD"])
@pytest.mark.parametrize("operator", [V1, V2, V3], ids=["v1", "v2", "v3"])
def test_sinks(operator: Any, layout: str) -> None:
    sinks = values(N, seed=5).float()
    for dtype in (torch.float16, torch.bfloat16):
        check_dense(operator, layout, dtype, {}, {}, sinks=sinks)


def test_sinks_of_masked_rows() -> None:
    kept = kept_by_mode(3, SKV, SQ)  # the first rows keep nothing
    options = {"sparse_mode": 3, "atten_mask": compressed_mask(3).npu()}
    sinks = values(N, seed=5).float()
    check_dense(V1, "BNSD", torch.float16, options, {"kept": kept}, lengths=(SKV, SQ), sinks=sinks)


def kept_elements(operator: Any, keep: float, **options: Any) -> Tensor:
    """Returns the elements that dropout keeps, from the output for unit vectors as values."""
    q, k = torch.zeros(B, N, SQ, D), torch.zeros(B, NK, SKV, D)
    v = torch.eye(SKV, D).expand(B, NK, SKV, D)
    out = operator(
        *(x.half().npu() for x in (q, k, v)), N, "BNSD", scale=SCALE, keep_prob=keep, **options
    )[0]
    return out.cpu()[..., :SKV] != 0


@pytest.mark.parametrize("operator", [V1, V2, V3], ids=["v1", "v2", "v3"])
def test_dropout(operator: Any) -> None:
    """The backward drops what the forward dropped, drawn from the generator's seed."""
    keep = 0.75
    masks = []
    for _ in range(2):
        torch.npu.manual_seed(7)
        masks.append(kept_elements(operator, keep))
    assert torch.equal(*masks)
    assert not torch.equal(masks[0], kept_elements(operator, keep))
    # 864 elements: four standard deviations.
    assert abs(masks[0].float().mean() - keep) < 4 * (keep * (1 - keep) / masks[0].numel()) ** 0.5
    for dtype in (torch.float16, torch.float32):
        torch.npu.manual_seed(7)
        drop = masks[0] / keep
        check_dense(operator, "BNSD", dtype, {"keep_prob": keep}, {"drop": drop})


def test_given_dropout_mask() -> None:
    kept = torch.randint(0, 2, (B * N * SQ * SKV,), generator=torch.Generator().manual_seed(0))
    packed = (kept.view(-1, 8) * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)
    q, k, v, _ = inputs(torch.float16)
    given = [x.npu() for x in (q, k, v)]
    out = V1(*given, N, "BNSD", scale=SCALE, keep_prob=0.5, dropout_mask=packed.npu())[0]
    exact = [x.double() for x in (q, k, v)]
    expected = attention(*exact, scale=SCALE, drop=kept.view(B, N, SQ, SKV) / 0.5)
    assert_close("out", out.cpu(), expected, TOLERANCES[torch.float16])
