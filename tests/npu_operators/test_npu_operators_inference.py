"""The operators for inference on the CPU against plain torch: layouts, lengths, masks, pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.attention import attention, causal
from support.npu_names import SQUARE, torch_npu
from torch import Tensor
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, NK, SQ, SKV, D = 3, 4, 2, 5, 11, 8
HEADS = {"num_heads": N, "num_key_value_heads": NK}
Q_LENGTHS, K_LENGTHS = [5, 2, 0], [11, 4, 6]


def inputs(queries: int = SQ, value_size: int = D) -> list[Tensor]:
    """query, key and value as (B, N, S, D)."""
    torch.manual_seed(0)
    sizes = ((N, queries, D), (NK, SKV, D), (NK, SKV, value_size))
    return [torch.randn(B, *size, dtype=torch.float64) for size in sizes]


IN: dict[str, Any] = {
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "BSND": lambda x: x.transpose(1, 2),
    "BNSD": lambda x: x,
}
OUT: dict[str, Any] = {**IN, "NBSD": lambda x: x.transpose(0, 1)}


def valid(lengths: Sequence[int], tokens: int) -> Tensor:
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]


def by_sequence(
    tensors: list[Tensor],
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    mode: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Each sequence alone, and 0 and +inf behind its queries."""
    query, key, value = tensors
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    lse = torch.full(query.shape[:3], torch.inf, dtype=torch.float64)
    for b, (lq, lk) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        keep = {0: None, 2: torch.ones(lq, lk, dtype=torch.bool).tril(), 3: causal(lq, lk)}[mode]
        one = (query[b : b + 1, :, :lq], key[b : b + 1, :, :lk], value[b : b + 1, :, :lk])
        if lq:
            out[b, :, :lq], lse[b, :, :lq] = (x[0] for x in attention(*one, keep, **options))
    return out, lse


@pytest.mark.parametrize(
    "layout", ["BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD", "BSH_NBSD", "BNSD_NBSD"]
)
def test_fused_layouts(layout: str) -> None:
    tensors = inputs(value_size=6)
    source, _, target = layout.partition("_")
    out, lse = torch_npu.npu_fused_infer_attention_score(
        *(IN[source](x) for x in tensors), input_layout=layout, scale=0.3, softmax_lse_flag=True,
        **HEADS,
    )  # fmt: skip
    expected, expected_lse = attention(*tensors, scale=0.3)
    assert_close(out, OUT[target or source](expected))
    assert_close(lse, expected_lse[..., None])


@pytest.mark.parametrize("mode", [0, 2, 3])
def test_fused_lengths_and_modes(mode: int) -> None:
    tensors = inputs()
    out, lse = torch_npu.npu_fused_infer_attention_score(
        *tensors, input_layout="BNSD", actual_seq_lengths=Q_LENGTHS,
        actual_seq_lengths_kv=K_LENGTHS, sparse_mode=mode, atten_mask=SQUARE if mode else None,
        softmax_lse_flag=True, **HEADS,
    )  # fmt: skip
    expected, expected_lse = by_sequence(tensors, Q_LENGTHS, K_LENGTHS, mode)
    assert_close(out, expected)
    assert_close(lse, expected_lse[..., None])


def test_fused_band() -> None:
    tensors = inputs()
    out, _ = torch_npu.npu_fused_infer_attention_score(
        *tensors, input_layout="BNSD", sparse_mode=4, pre_tokens=3, next_tokens=1,
        atten_mask=SQUARE[None, None], **HEADS,
    )  # fmt: skip
    i, j = torch.arange(SQ)[:, None] + SKV - SQ, torch.arange(SKV)
    assert_close(out, attention(*tensors, (j >= i - 3) & (j <= i + 1))[0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(SQ, SKV), (B, SQ, SKV), (1, 1, SQ, SKV), (B, 1, SQ, SKV + 5)])
@pytest.mark.parametrize("mode", [0, 1])
def test_fused_full_masks(mode: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors = inputs()
    mask = torch.rand(shape) < 0.4
    mask[..., 2, :] = True  # a row without keys
    out, lse = torch_npu.npu_fused_infer_attention_score(
        *tensors, input_layout="BNSD", sparse_mode=mode, atten_mask=mask.to(dtype), next_tokens=4,
        actual_seq_lengths_kv=K_LENGTHS, softmax_lse_flag=True, **HEADS,
    )  # fmt: skip
    full = mask[..., :SKV].expand(B, *([1] if len(shape) == 4 else []), SQ, SKV)
    keep = ~full.reshape(B, 1, SQ, SKV) & valid(K_LENGTHS, SKV)[:, None, None]
    if mode == 0:
        keep = keep.tril(4)
    expected, expected_lse = attention(*tensors, keep)
    assert_close(out, expected)
    assert_close(lse, expected_lse[..., None])


@pytest.mark.parametrize("mode", [0, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_sinks(mode: int, masked: bool) -> None:
    tensors, sink = inputs(), torch.randn(N).bfloat16()
    options: dict[str, Any] = {"sparse_mode": mode, "atten_mask": SQUARE if mode else None}
    mask = torch.rand(SQ, SKV) < 0.4
    mask[2] = True  # a row without keys
    if masked:
        options = {"sparse_mode": 1, "atten_mask": mask}
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        *tensors, num_query_heads=N, num_key_value_heads=NK, input_layout="BNSD",
        actual_seq_qlen=Q_LENGTHS, actual_seq_kvlen=K_LENGTHS, learnable_sink=sink,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    for b, (lq, lk) in enumerate(zip(Q_LENGTHS, K_LENGTHS, strict=True)):
        one = [tensors[0][b : b + 1, :, :lq], *(x[b : b + 1, :, :lk] for x in tensors[1:])]
        keep = ~mask[:lq, :lk] if masked else causal(lq, lk) if mode else None
        expected, expected_lse = attention(*one, keep, sink=sink)
        assert_close(out[b, :, :lq], expected[0])
        assert_close(lse[b, :, :lq, 0], expected_lse[0])


def test_fused_sinks_of_another_dtype() -> None:
    with pytest.raises(
        NotImplementedError, match=r"learnable_sink: expected float16 or bfloat16, got .* float32"
    ):
        torch_npu.npu_fused_infer_attention_score_v2(
            *inputs(), num_query_heads=N, num_key_value_heads=NK, input_layout="BNSD",
            learnable_sink=torch.zeros(N),
        )  # fmt: skip


@pytest.mark.parametrize("layout", ["TND", "NTD", "TND_NTD", "NTD_TND"])
def test_fused_packed_sequences(layout: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(*x, D).double() for x in ((9, N), (14, NK), (14, NK)))
    q_ends, k_ends = [3, 3, 8], [4, 6, 11]  # tokens behind the last sequence belong to none
    source, _, target = layout.partition("_")

    def turned(x: Tensor, layout: str) -> Tensor:
        return x if layout == "TND" else x.transpose(0, 1)

    out, lse = torch_npu.npu_fused_infer_attention_score(
        *(turned(x, source) for x in (query, key, value)), input_layout=layout,
        actual_seq_lengths=q_ends, actual_seq_lengths_kv=k_ends, sparse_mode=3, atten_mask=SQUARE,
        softmax_lse_flag=True, **HEADS,
    )  # fmt: skip
    expected, expected_lse = torch.zeros_like(query), torch.full((9, N), torch.inf).double()
    for q0, q1, k0, k1 in ((0, 3, 0, 4), (3, 8, 6, 11)):
        one = [x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1])]
        part, part_lse = attention(*one, causal(q1 - q0, k1 - k0))
        expected[q0:q1], expected_lse[q0:q1] = part[0].transpose(0, 1), part_lse[0].T
    assert_close(turned(out, target or source), expected)
    assert_close(lse, expected_lse[..., None])


BLOCK = 4
TABLE = torch.tensor([[5, 2, 8], [1, -1, -1], [0, 7, -1]], dtype=torch.int32)


def paged(x: Tensor, form: str) -> Tensor:
    """(B, N, S, D) spread over the blocks of TABLE."""
    cache = torch.full((9, BLOCK, *x.shape[1::2]), torch.nan, dtype=x.dtype)
    for b, length in enumerate(K_LENGTHS):
        for j in range(length):
            cache[TABLE[b, j // BLOCK], j % BLOCK] = x[b, :, j]
    if form == "heads together":
        return cache.flatten(2)
    if form == "head by head":
        return cache.transpose(1, 2)
    return cache.unflatten(3, (-1, 2)).permute(0, 2, 3, 1, 4).contiguous()


each_cache = pytest.mark.parametrize("form", ["heads together", "head by head", "fractal"])


@each_cache
def test_fused_pages(form: str) -> None:
    tensors = inputs()
    # A block holds NaN where no key is: what is not read has no part in the result.
    cache = [paged(x, form).nan_to_num(1e3) for x in tensors[1:]]
    paging = {"block_table": TABLE, "block_size": BLOCK, "actual_seq_lengths_kv": K_LENGTHS}
    out, _ = torch_npu.npu_fused_infer_attention_score(
        tensors[0], *cache, input_layout="BNSD", sparse_mode=3, atten_mask=SQUARE, **paging, **HEADS
    )
    expected, _ = by_sequence(tensors, [SQ] * B, K_LENGTHS, 3)
    assert_close(out, expected)
    packed = tensors[0].transpose(1, 2).flatten(0, 1)
    out, _ = torch_npu.npu_fused_infer_attention_score(
        packed, *cache, input_layout="TND", sparse_mode=3, atten_mask=SQUARE,
        actual_seq_lengths=[SQ, 2 * SQ, 3 * SQ], **paging, **HEADS,
    )  # fmt: skip
    assert_close(out, expected.transpose(1, 2).flatten(0, 1))


def test_each_cache_is_gathered_once() -> None:
    query, *tensors = inputs()
    caches = [paged(x, "heads together") for x in tensors]
    with torch.profiler.profile() as profile:
        torch_npu.npu_fused_infer_attention_score(
            query, *caches, input_layout="BNSD", sparse_mode=3, atten_mask=SQUARE,
            block_table=TABLE, block_size=BLOCK, actual_seq_lengths_kv=K_LENGTHS, **HEADS,
        )  # fmt: skip
    assert sum(event.name == "aten::index" for event in profile.events()) == len(caches)


@pytest.mark.parametrize("with_pages", [False, True])
def test_fused_ropes(with_pages: bool) -> None:
    """Absorbed latent attention: one head of keys, which are the values too."""
    torch.manual_seed(0)
    query, query_rope = torch.randn(B, N, 1, D).double(), torch.randn(B, N, 1, 4).double()
    latent, key_rope = torch.randn(B, 1, SKV, D).double(), torch.randn(B, 1, SKV, 4).double()
    keys, paging = [latent, key_rope], {}
    if with_pages:
        keys = [paged(x, "heads together").nan_to_num(1e3) for x in keys]
        paging = {"block_table": TABLE, "block_size": BLOCK}
    out, _ = torch_npu.npu_fused_infer_attention_score(
        query, keys[0], keys[0], query_rope=query_rope, key_rope=keys[1], num_heads=N,
        num_key_value_heads=1, input_layout="BNSD", scale=0.3, actual_seq_lengths_kv=K_LENGTHS,
        **paging,
    )  # fmt: skip
    wide = [torch.cat(x, -1) for x in ((query, query_rope), (latent, key_rope))]
    assert_close(out, by_sequence([*wide, latent], [1] * B, K_LENGTHS, 0, scale=0.3)[0])


def test_the_second_version_says_the_same() -> None:
    tensors = inputs()
    first = torch_npu.npu_fused_infer_attention_score(
        *tensors, input_layout="BNSD", actual_seq_lengths=Q_LENGTHS, scale=0.3, sparse_mode=3,
        actual_seq_lengths_kv=K_LENGTHS, atten_mask=SQUARE, softmax_lse_flag=True, **HEADS,
    )  # fmt: skip
    second = torch_npu.npu_fused_infer_attention_score_v2(
        *tensors, input_layout="BNSD", actual_seq_qlen=Q_LENGTHS, actual_seq_kvlen=K_LENGTHS,
        softmax_scale=0.3, num_query_heads=N, num_key_value_heads=NK, sparse_mode=3,
        atten_mask=SQUARE, return_softmax_lse=True,
    )  # fmt: skip
    assert_close(second, first, rtol=0, atol=0)
    assert torch_npu.npu_fused_infer_attention_score(*tensors, input_layout="BNSD", **HEADS)[
        1
    ].shape == (0,)


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_incremental(layout: str) -> None:
    tensors = inputs(queries=1)
    given = [IN[layout](x) for x in tensors]
    options = {"input_layout": layout, "scale_value": 0.3, **HEADS}
    out = torch_npu.npu_incre_flash_attention(*given, actual_seq_lengths=K_LENGTHS, **options)
    expected = by_sequence(tensors, [1] * B, K_LENGTHS, 0, scale=0.3)[0]
    assert_close(out, OUT[layout](expected))
    for axes in ((), (1,), (1, 1)):
        mask = ~valid(K_LENGTHS, SKV).view(B, *axes, SKV)
        out = torch_npu.npu_incre_flash_attention(*given, atten_mask=mask, **options)
        assert_close(out, OUT[layout](expected))


@each_cache
def test_incremental_pages(form: str) -> None:
    tensors = inputs(queries=1)
    cache = [paged(x, form).nan_to_num(1e3) for x in tensors[1:]]
    out = torch_npu.npu_incre_flash_attention(
        IN["BSH"](tensors[0]), *cache, actual_seq_lengths=K_LENGTHS, block_table=TABLE,
        block_size=BLOCK, **HEADS,
    )  # fmt: skip
    assert_close(out, IN["BSH"](by_sequence(tensors, [1] * B, K_LENGTHS, 0)[0]))


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
def test_prompt(layout: str) -> None:
    tensors = inputs()
    source, _, target = layout.partition("_")
    out = torch_npu.npu_prompt_flash_attention(
        *(IN[source](x) for x in tensors), input_layout=layout, actual_seq_lengths=Q_LENGTHS,
        actual_seq_lengths_kv=K_LENGTHS, sparse_mode=3, atten_mask=SQUARE, **HEADS,
    )  # fmt: skip
    expected = by_sequence(tensors, Q_LENGTHS, K_LENGTHS, 3)[0]
    assert_close(out, OUT[target or source](expected))


def test_prompt_of_one_sequence() -> None:
    tensors = [x[0] for x in inputs()]
    out = torch_npu.npu_prompt_flash_attention(*tensors, input_layout="NSD", **HEADS)
    assert_close(out, attention(*(x[None] for x in tensors))[0][0])
    out, _ = torch_npu.npu_fused_infer_attention_score(*tensors, input_layout="NSD", **HEADS)
    assert_close(out, attention(*(x[None] for x in tensors))[0][0])


def test_a_mask_of_the_prompt_is_causal_unless_told() -> None:
    tensors = inputs()
    mask = torch.zeros(SQ, SKV, dtype=torch.bool)
    options = {"input_layout": "BNSD", "atten_mask": mask, **HEADS}
    out = torch_npu.npu_prompt_flash_attention(*tensors, **options)
    assert_close(out, attention(*tensors, torch.ones(SQ, SKV, dtype=torch.bool).tril())[0])
    out, _ = torch_npu.npu_fused_infer_attention_score(*tensors, **options)
    assert_close(out, attention(*tensors)[0])
