"""The calls that vLLM-Ascend makes of npu_fused_infer_attention_score, on the CPU."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from ascend_attn_ops import attention_update, limits
from support.attention import attention, causal
from support.npu_names import SQUARE, torch_npu
from torch import Tensor
from torch.testing import assert_close

N, NK, D, BLOCK = 8, 2, 128, 128
MASK = SQUARE.to(torch.int8)
SCALE = D**-0.5
INT32_MAX = 2**31 - 1


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def heads_first(x: Tensor) -> Tensor:
    """(T, N, D) as (1, N, T, D)."""
    return x.double().transpose(0, 1)[None]


def close(out: Tensor, expected: Tensor) -> None:
    """The operator rounds the output to bfloat16, and before it the probabilities."""
    assert_close(out.double(), expected, rtol=2**-8, atol=6e-3)


class Cache:
    """Keys or values of sequences in the blocks of a table, in any order; NaN elsewhere."""

    def __init__(self, lengths: list[int], table: Tensor | None = None) -> None:
        blocks = max(1, -(-max(lengths) // BLOCK))
        count = len(lengths) * blocks
        self.table = torch.randperm(count).int().view(-1, blocks) if table is None else table
        self.pages = torch.full((count, BLOCK, NK, D), torch.nan).bfloat16()
        self.tokens = [normal(length, NK, D) for length in lengths]
        for row, tokens in zip(self.table.tolist(), self.tokens, strict=True):
            for block, part in zip(row, tokens.split(BLOCK), strict=False):
                self.pages[block, : len(part)] = part

    @property
    def rows(self) -> Tensor:
        return self.pages.flatten(2)


def windowed(queries: int, keys: int, window: int) -> Tensor:
    keep = causal(queries, keys)
    return keep & ~keep.new_ones(queries, keys).tril(keys - queries - window - 1)


@pytest.mark.parametrize("causal_mask", [True, False])
def test_packed_keys(causal_mask: bool) -> None:
    """attention_v1 without a cache: int8 mask, block_size without pages. mm_encoder_attention."""
    ends = list(accumulate([5, 130, 1]))
    query, key, value = (normal(ends[-1], n, D) for n in (N, NK, NK))
    options = {"atten_mask": MASK, "sparse_mode": 3} if causal_mask else {"sparse_mode": 0}
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query=query, key=key, value=value, block_table=None, input_layout="TND", block_size=BLOCK,
        actual_seq_lengths=ends, actual_seq_lengths_kv=ends, num_key_value_heads=NK, num_heads=N,
        scale=SCALE, **options,
    )  # fmt: skip
    assert out.shape == query.shape
    for begin, end in pairwise([0, *ends]):
        tensors = [heads_first(x[begin:end]) for x in (query, key, value)]
        keep = causal(end - begin, end - begin) if causal_mask else None
        close(out[begin:end], attention(*tensors, keep, scale=SCALE)[0][0].transpose(0, 1))


# Queries and keys of each sequence: chunked prefill, decoding, speculative decoding, and a graph
# that is padded with queries of sequences without keys.
STEPS = {
    "chunked": ([17, 3], [145, 300]),
    "decode": ([1, 1, 1], [129, 1, 256]),
    "speculative": ([2, 5, 8], [140, 5, 300]),
    "padded graph": ([1, 1, 2, 1, 1, 0, 1, 1], [40, 17, 133, 0, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_pages(step: str, with_sink: bool, window: int) -> None:
    """attention_v1: TND queries over pages, with a window and sinks of gpt-oss."""
    queries, keys = STEPS[step]
    key = Cache(keys)
    value = Cache(keys, table=key.table)
    ends = list(accumulate(queries))
    query, sink = normal(ends[-1], N, D), normal(N) if with_sink else None
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        query, key.rows, value.rows, num_query_heads=N, num_key_value_heads=NK,
        input_layout="TND", softmax_scale=SCALE, block_table=key.table, block_size=BLOCK,
        actual_seq_qlen=ends, actual_seq_kvlen=keys, atten_mask=MASK, learnable_sink=sink,
        sparse_mode=4 if window else 3, pre_tokens=window or INT32_MAX,
        next_tokens=0 if window else INT32_MAX,
    )  # fmt: skip
    assert lse.shape == (0,)
    for b, (begin, end) in enumerate(pairwise([0, *ends])):
        rows, count = end - begin, keys[b]
        if not rows or not count:
            assert not out[begin:end].any()
            continue
        tensors = [heads_first(x) for x in (query[begin:end], key.tokens[b], value.tokens[b])]
        keep = windowed(rows, count, window) if window else causal(rows, count)
        expected, _ = attention(*tensors, keep, scale=SCALE, sink=sink)
        close(out[begin:end], expected[0].transpose(0, 1))


@pytest.mark.parametrize("device", ["A2", None])
@pytest.mark.parametrize("compiled", [False, True])
def test_int8_pages(compiled: bool, device: Any) -> None:
    """attention_v1 decoding by C8: scales of channels, and the form of graphs."""
    keys, table = [300, 1, 129], torch.randperm(9).int().view(3, 3)
    pages = torch.randint(-128, 128, (2, 9, NK, D // 32, BLOCK, 32), dtype=torch.int8)
    scales, query = torch.rand(2, NK, 1, D).bfloat16() / 64, normal(3, N, 1, D)
    options: dict[str, Any] = {
        "num_heads": N, "num_key_value_heads": NK, "input_layout": "BNSD", "scale": SCALE,
        "antiquant_mode": 0, "antiquant_scale": None, "key_antiquant_scale": scales[0],
        "value_antiquant_scale": scales[1], "key_antiquant_mode": 0, "value_antiquant_mode": 0,
        "block_table": table, "block_size": BLOCK, "actual_seq_lengths_kv": keys,
        "sparse_mode": 0, "inner_precise": 1,
    }  # fmt: skip

    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch_npu.npu_fused_infer_attention_score(query, key, value, **options)[0]

    given = [torch.empty_like(query), torch.empty(1)]
    with limits(device):
        out = (torch.compile(step, backend="aot_eager") if compiled else step)(query, *pages)
        torch_npu.npu_fused_infer_attention_score.out(query, *pages, **options, out=given)
    assert torch.equal(given[0], out)
    for b, count in enumerate(keys):
        rows = pages[:, table[b]].transpose(3, 4).flatten(4).transpose(1, 2).flatten(2, 3)
        both = (rows * scales.double())[:, :, :count]
        close(out[b], attention(query[b : b + 1].double(), *both[:, None], scale=SCALE)[0][0])


def test_context_parallelism() -> None:
    """attention_cp: parts of the keys, one of them empty, merged by their log-sum-exp."""
    query, key, value = normal(2, 1, N, D), normal(2, 60, NK, D), normal(2, 60, NK, D)
    counts = [[20, 7], [0, 33], [40, 0]]
    options: dict[str, Any] = {
        "num_heads": N, "num_key_value_heads": NK, "input_layout": "BSND", "scale": SCALE,
        "softmax_lse_flag": True,
    }  # fmt: skip
    parts = [
        torch_npu.npu_fused_infer_attention_score(
            query, key, value, actual_seq_lengths_kv=lengths, **options
        )
        for lengths in counts
    ]
    for b in range(2):
        lse = [part[1][b, :, 0, 0] for part in parts]
        out = [part[0][b, 0].float() for part in parts]
        merged, _ = attention_update([torch.where(x == torch.inf, -x, x) for x in lse], out)
        keys = [torch.cat([x[b, : counts[i][b]] for i in range(3)]) for x in (key, value)]
        expected, _ = attention(heads_first(query[b]), *map(heads_first, keys), scale=SCALE)
        close(merged, expected[0, :, 0])


@pytest.mark.parametrize("form", ["rows", "heads"])
def test_a_cache_is_read_where_it_lies(form: str) -> None:
    """A decoding step allocates no memory of a cache's size."""
    cache = Cache([128 * 16])
    pages = cache.rows if form == "rows" else cache.pages.transpose(1, 2).contiguous()
    with torch.profiler.profile(profile_memory=True) as profile:
        torch_npu.npu_fused_infer_attention_score(
            normal(1, N, D), pages, pages, num_heads=N, num_key_value_heads=NK, block_size=BLOCK,
            input_layout="TND", block_table=cache.table, actual_seq_lengths=[1],
            actual_seq_lengths_kv=[128 * 16], scale=SCALE,
        )  # fmt: skip
    most = max(event.cpu_memory_usage for event in profile.events())
    assert most < pages.nbytes / 4
