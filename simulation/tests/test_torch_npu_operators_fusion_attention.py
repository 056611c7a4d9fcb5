"""npu_fusion_attention, _v2 and _v3 of torch_npu on the simulated NPU, forward and backward."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import cann_simulator
import pytest
import torch
import torch_npu
from support.attention import attention, to_layout
from support.tolerance import assert_close
from torch import Tensor
from torch_npu_calls import HALF, LENGTHS, SCALE, TOLERANCES, check, mask, values

pytestmark = pytest.mark.usefixtures("no_leak")

N, NK, D, ROPE = 4, 2, 16, 8
B, SQ, SKV = 2, 9, 12
DENSE, PACK = ([SQ] * B, [SKV] * B), ([5, 1, 8, 3], [9, 1, 8, 17])
each_version = pytest.mark.parametrize("version", ["", "_v2", "_v3"])
each_layout = pytest.mark.parametrize("layout", ["BSH", "SBH", "BSND", "BNSD", "TND"])


def check_fusion(
    version: str, layout: str, dtype: torch.dtype = torch.float16, *,
    lengths: tuple[list[int], list[int]] | None = None, sinks: bool = False, ropes: bool = False,
    sizes: tuple[int, int] = (D, ROPE), gradients: bool = True, **options: Any,
) -> None:  # fmt: skip
    queries, keys = lengths or (PACK if layout == "TND" else DENSE)
    tq, tk, (d, rope) = sum(queries), sum(keys), sizes
    shapes = {"query": (tq, N, d), "key": (tk, NK, d), "value": (tk, NK, d)}
    if ropes:
        shapes |= {"query_rope": (tq, N, rope), "key_rope": (tk, NK, rope)}
        # A2 and A3 take ropes beside a mask alone.
        options |= {"sparse_mode": 3, "atten_mask": mask(3)}
    for i, (name, shape) in enumerate(shapes.items()):
        x = values(*shape, seed=i).to(dtype)
        if layout != "TND":
            x = to_layout(x.unflatten(0, (B, -1)).transpose(1, 2), layout)
        options[name] = x.requires_grad_(gradients)
    if sinks:
        options["sink"] = values(N, seed=8).float().requires_grad_()
    if layout == "TND":
        for name, x in zip(LENGTHS, (queries, keys), strict=True):
            ends = list(accumulate(x))
            options[name] = torch.tensor(ends) if version == "_v3" else ends
    options |= {"head_num": N, "input_layout": layout, "scale": SCALE}
    check(f"npu_fusion_attention{version}", **options)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@each_layout
@each_version
def test_fusion_attention(version: str, layout: str, dtype: torch.dtype) -> None:
    check_fusion(version, layout, dtype)
    if dtype != torch.float32:
        options = {"softmax_layout": "TND"} if layout == "TND" else {}
        check_fusion(version, layout, dtype, sinks=True, **options)


@pytest.mark.parametrize(
    ("layout", "mode", "pre", "next"),
    [
        *(("BNSD", mode, 4, 2) for mode in range(7)),
        *(("TND", *x) for x in ((2, 0, 0), (3, 0, 0), (4, 6, 1), (7, 20, -2), (8, 9, 1))),
    ],
)
@each_version
def test_sparse_modes(version: str, layout: str, mode: int, pre: int, next: int) -> None:
    options: dict[str, Any] = {"sparse_mode": mode}
    if mode == 8:
        options["lengths"] = [9, 4, 2], [9, 6, 2]
    if mode in (4, 7, 8):
        tokens = "tokens" if version == "_v2" else "tockens"
        options |= {f"pre_{tokens}": pre, f"next_{tokens}": next}
    if mode in (5, 6):
        options["prefix"] = [5, 9]
    if mode in (0, 1):
        options["atten_mask"] = values(B, 1, SQ, SKV, seed=9) > 0.5
    elif mode == 5:
        i, j = torch.arange(SQ).view(-1, 1), torch.arange(SKV)
        kept = [(j < prefix) | (j <= i + SKV - SQ) for prefix in options["prefix"]]
        options["atten_mask"] = torch.stack(kept)[:, None].logical_not()
    else:
        options["atten_mask"] = mask(mode)
    check_fusion(version, layout, **options)


def test_window_of_mode_0() -> None:
    i, j = torch.arange(SQ).view(-1, 1), torch.arange(SKV)
    outside = (j < i - 3) | (j > i + 1)
    options = {"pre_tockens": 3, "next_tockens": 1, "atten_mask": outside}
    check_fusion("", "BSND", torch.bfloat16, **options)


@pytest.mark.parametrize("rows", [SQ, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_pse(dtype: torch.dtype, rows: int) -> None:
    pse = values(B, N, rows, SKV, seed=7).to(dtype)
    check_fusion("", "BSH", dtype, pse=pse)
    check_fusion("_v2", "BSH", dtype, pse=pse, pse_type=0)


@pytest.mark.parametrize("pse_type", [2, 3])
def test_slopes(pse_type: int) -> None:
    slopes = values(N, seed=7).abs().float()
    options = {"pse": slopes, "pse_type": pse_type, "q_start_idx": [1], "kv_start_idx": [2]}
    check_fusion("_v2", "BNSD", torch.float32, lengths=([SQ] * B, [SQ] * B), **options)


def test_sinks_of_masked_rows() -> None:
    """The first rows keep nothing."""
    options = {"sparse_mode": 3, "atten_mask": mask(3)}
    check_fusion("", "BNSD", lengths=(DENSE[1], DENSE[0]), sinks=True, **options)


# _v2 heeds softmax_layout with sinks alone.
@pytest.mark.parametrize("version", ["", "_v3"])
def test_statistics_in_the_order_of_tokens(version: str) -> None:
    check_fusion(version, "TND", softmax_layout="TND")


@pytest.mark.parametrize("sinks", [False, True])
def test_ropes_of_packed_sequences(sinks: bool) -> None:
    options = {"softmax_layout": "TND"} if sinks else {}
    check_fusion("_v2", "TND", torch.bfloat16, ropes=True, sinks=sinks, **options)


def kept_elements(version: str, keep: float) -> Tensor:
    """Returns the elements that dropout keeps, from the output for unit vectors as values."""
    q, k = torch.zeros(B, N, SQ, D), torch.zeros(B, NK, SKV, D)
    v = torch.eye(SKV, D).expand(B, NK, SKV, D)
    given = [x.half().npu() for x in (q, k, v)]
    operator = getattr(torch_npu, f"npu_fusion_attention{version}")
    return operator(*given, N, "BNSD", scale=SCALE, keep_prob=keep)[0].cpu()[..., :SKV] != 0


@each_version
def test_dropout(version: str) -> None:
    """The backward drops what the forward dropped, drawn from the generator's seed."""
    keep = 0.75
    kept = []
    for _ in range(2):
        torch.npu.manual_seed(7)
        kept.append(kept_elements(version, keep))
    assert torch.equal(*kept)
    assert not torch.equal(kept[0], kept_elements(version, keep))
    # 864 elements: four standard deviations.
    assert abs(kept[0].float().mean() - keep) < 4 * (keep * (1 - keep) / kept[0].numel()) ** 0.5
    shapes = (B, N, SQ, D), (B, NK, SKV, D), (B, NK, SKV, D), (B, N, SQ, D)
    *rounded, dy = (values(*shape, seed=i).half() for i, shape in enumerate(shapes))
    exact = [x.double().requires_grad_() for x in rounded]
    expected = attention(*exact, scale=SCALE, weight=kept[0] / keep)[0]
    gradients = torch.autograd.grad(expected, exact, dy.double())
    given = [x.npu().requires_grad_() for x in rounded]
    torch.npu.manual_seed(7)
    operator = getattr(torch_npu, f"npu_fusion_attention{version}")
    out = operator(*given, N, "BNSD", scale=SCALE, keep_prob=keep)[0]
    actual = torch.autograd.grad(out, given, dy.npu())
    for x, y in zip((out, *actual), (expected, *gradients), strict=True):
        assert_close("dropout", x.cpu(), y, TOLERANCES[torch.float16])


@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_given_dropout_mask(layout: str) -> None:
    lengths = PACK if layout == "TND" else DENSE
    scores = sum(N * sq * skv for sq, skv in zip(*lengths, strict=True))
    bits = torch.full((-(-scores // 128) * 16,), 0b10100101, dtype=torch.uint8)
    check_fusion("", layout, gradients=False, keep_prob=0.5, dropout_mask=bits)


def test_functions_called() -> None:
    by_token = {"softmax_layout": "TND"}
    with cann_simulator.recorded_calls() as calls:
        check_fusion("", "BSH")
        check_fusion("_v2", "BSH")
        check_fusion("", "BSH", sinks=True)
        check_fusion("", "TND")
        check_fusion("_v2", "TND")
        check_fusion("_v2", "TND", torch.bfloat16, ropes=True)
        check_fusion("", "TND", **by_token)
        check_fusion("", "TND", sinks=True, **by_token)
    names = [x["function"] for x in calls if x.get("phase") == 1 and "Attention" in x["function"]]
    expected = [f"Score{x}{version}" for version in ("", "V2", "V3") for x in ("", "Grad")]
    for version in ("", "V2", "V3", "V4", "V5"):
        expected += [f"VarLenScore{version}", f"UnpaddingScoreGrad{version}"]
    assert names == [f"aclnnFlashAttention{x}" for x in expected]
