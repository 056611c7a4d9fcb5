"""npu_scatter_pa_kv_cache, npu_attention_update and npu_ring_attention_update of torch_npu on the
simulated NPU."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
import torch_npu
from plain_attention import TOLERANCES, attention, log_sum_exp, statistics, values
from support.tolerance import assert_close
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_leak")

SCALE = 0.25
BLOCKS, BLOCK, HEADS, D = 4, 16, 2, 32
DTYPES = [torch.float16, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8])
def test_scatter_to_blocks(dtype: torch.dtype) -> None:
    key, value = (10 * values(5, HEADS, D, seed=i) for i in (1, 2))
    slots = torch.tensor([3, 17, 63, 16, 0], dtype=torch.int32)
    caches = [torch.zeros(BLOCKS, BLOCK, HEADS, D, dtype=dtype).npu() for _ in range(2)]
    given = [x.to(dtype).npu() for x in (key, value)]
    torch_npu.npu_scatter_pa_kv_cache(*given, *caches, slots.npu(), cache_mode="Norm")
    for cache, x in zip(caches, (key, value), strict=True):
        expected = torch.zeros(BLOCKS * BLOCK, HEADS, D, dtype=dtype)
        expected[slots.long()] = x.to(dtype)
        assert torch.equal(cache.cpu().view(expected.shape), expected)


@each_dtype
def test_scatter_to_nz_blocks(dtype: torch.dtype) -> None:
    """The default cache_mode: (blocks, N * D / 16, block size, 16)."""
    key, value = (values(5, HEADS, D, seed=i).to(dtype) for i in (1, 2))
    slots = torch.tensor([3, 17, 63, 16, 0], dtype=torch.int32)
    shape = BLOCKS, HEADS * D // 16, BLOCK, 16
    caches = [torch.zeros(shape, dtype=dtype).npu() for _ in range(2)]
    torch_npu.npu_scatter_pa_kv_cache(key.npu(), value.npu(), *caches, slots.npu())
    for cache, x in zip(caches, (key, value), strict=True):
        expected = torch.zeros(BLOCKS * BLOCK, HEADS * D, dtype=dtype)
        expected[slots.long()] = x.flatten(1)
        as_rows = cache.cpu().transpose(1, 2).reshape(expected.shape)
        assert torch.equal(as_rows, expected)


def parts(dtype: torch.dtype) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """One query, and the keys and values of two sets, all (B, N, S, D)."""
    query = values(2, HEADS, 5, D).to(dtype)
    sizes = (2, HEADS, 9, D), (2, HEADS, 4, D)
    return query, [
        (values(*size, seed=i).to(dtype), values(*size, seed=i + 2).to(dtype))
        for i, size in enumerate(sizes)
    ]


def over_all(query: Tensor, sets: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    key, value = (torch.cat(x, 2) for x in zip(*sets, strict=True))
    _, top, total = statistics(query.double(), key.double(), scale=SCALE)
    out = attention(query.double(), key.double(), value.double(), scale=SCALE)
    return out, top, total


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("update_type", [0, 1])
def test_attention_update(update_type: int, dtype: torch.dtype) -> None:
    query, sets = parts(dtype)
    lse, outs = [], []
    for key, value in sets:
        one = query.double(), key.double()
        lse.append(log_sum_exp(*one, scale=SCALE).flatten().float().npu())
        outs.append(attention(*one, value.double(), scale=SCALE).view(-1, D).to(dtype).npu())
    out, lse_out = torch_npu.npu_attention_update(lse, outs, update_type)
    expected, top, total = over_all(query, sets)
    assert_close("out", out.cpu(), expected.view(-1, D), TOLERANCES[dtype])
    if update_type == 1:
        together = (top + total.log()).flatten()
        assert_close("lse", lse_out.cpu(), together, TOLERANCES[torch.float32])


def eight_lanes(x: Tensor) -> Tensor:
    return x.expand(*x.shape[:-1], 8).float().contiguous()


NEEDS_RING_ATTENTION_UPDATE = pytest.mark.skipif(
    not hasattr(torch_npu, "npu_ring_attention_update"),
    reason=f"torch_npu {torch_npu.__version__} has no npu_ring_attention_update",
)


@NEEDS_RING_ATTENTION_UPDATE
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_ring_attention_update(dtype: torch.dtype) -> None:
    query, sets = parts(dtype)
    given = []
    for key, value in sets:
        one = query.double(), key.double()
        _, top, total = statistics(*one, scale=SCALE)
        out = attention(*one, value.double(), scale=SCALE)
        as_sbh = out.permute(2, 0, 1, 3).flatten(2).to(dtype)
        given += [as_sbh.npu(), eight_lanes(top).npu(), eight_lanes(total).npu()]
    out, top, total = torch_npu.npu_ring_attention_update(*given)
    expected = over_all(query, sets)
    assert_close("out", out.cpu(), expected[0].permute(2, 0, 1, 3).flatten(2), TOLERANCES[dtype])
    for name, x, y in (("max", top, expected[1]), ("sum", total, expected[2])):
        assert_close(name, x.cpu(), y.expand(x.shape), TOLERANCES[torch.float32])


@NEEDS_RING_ATTENTION_UPDATE
@pytest.mark.parametrize("softmax_layout", ["TND", ""])
def test_ring_attention_update_of_packed_sequences(softmax_layout: str) -> None:
    lengths = [3, 5, 1]
    bounds = [0, *accumulate(lengths)]
    tokens = bounds[-1]
    shape = tokens, HEADS
    outs = [values(*shape, D, seed=i).float() for i in (1, 2)]
    tops = [values(*shape, 1, seed=i).float() for i in (3, 4)]
    totals = [values(*shape, 1, seed=i).abs().float() + 1 for i in (5, 6)]

    def stored(x: Tensor) -> Tensor:
        """(T, N, 8) in the order of the layout."""
        lanes = eight_lanes(x)
        if softmax_layout == "TND":
            return lanes
        rows = [lanes[begin:end].transpose(0, 1).flatten() for begin, end in pairwise(bounds)]
        return torch.cat(rows).view(lanes.shape)

    given = []
    for out, top, total in zip(outs, tops, totals, strict=True):
        given += [out.npu(), stored(top).npu(), stored(total).npu()]
    actual = torch_npu.npu_ring_attention_update(
        *given,
        actual_seq_qlen=torch.tensor(bounds).npu(),
        input_layout="TND",
        input_softmax_layout=softmax_layout,
    )
    top = torch.maximum(*tops).double()
    weights = [x.double() * (y.double() - top).exp() for x, y in zip(totals, tops, strict=True)]
    expected = sum(w * out.double() for w, out in zip(weights, outs, strict=True)) / sum(weights)
    assert_close("out", actual[0].cpu(), expected, TOLERANCES[torch.float32])
    for name, x, y in (("max", actual[1], top), ("sum", actual[2], sum(weights))):
        assert_close(name, x.cpu(), stored(y), TOLERANCES[torch.float32])
