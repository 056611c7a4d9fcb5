"""npu_prompt_flash_attention, npu_incre_flash_attention and npu_fused_infer_attention_score of
torch_npu on the simulated NPU; of the last, its _v2 as well."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import cann_simulator
import pytest
import torch
import torch_npu
from plain_attention import (
    TOLERANCES,
    attention,
    compressed_mask,
    kept_by_mode,
    log_sum_exp,
    values,
)
from support.attention import to_layout
from support.tolerance import assert_close
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_leak")

SCALE = 0.25
B, N, NK, SQ, SKV, D = 3, 4, 2, 7, 20, 16
HALF = [torch.float16, torch.bfloat16]
# To the arguments of npu_fused_infer_attention_score_v2.
V2_NAMES = {
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "softmax_lse_flag": "return_softmax_lse",
}


def fused(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return torch_npu.npu_fused_infer_attention_score(*tensors, **options)


def fused_v2(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    renamed = {V2_NAMES.get(name, name): x for name, x in options.items()}
    return torch_npu.npu_fused_infer_attention_score_v2(*tensors, **renamed)


each_fused = pytest.mark.parametrize("operator", [fused, fused_v2], ids=["v1", "v2"])


def dense(dtype: torch.dtype, sq: int = SQ) -> list[Tensor]:
    """(B, N, S, D): query, key, value."""
    shapes = (B, N, sq, D), (B, NK, SKV, D), (B, NK, SKV, D)
    return [values(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


def expected_of(
    tensors: list[Tensor],
    query_lengths: list[int] | None = None,
    key_lengths: list[int] | None = None,
    **plain: Any,
) -> tuple[Tensor, Tensor]:
    """Output and lse of (B, N, S, D); positions behind the lengths are 0 and inf."""
    q, k, v = (x.double() for x in tensors)
    out = torch.zeros(*q.shape[:3], v.size(-1), dtype=torch.float64)
    lse = torch.full((*q.shape[:3], 1), torch.inf, dtype=torch.float64)
    for b in range(q.size(0)):
        sq = query_lengths[b] if query_lengths else q.size(2)
        skv = key_lengths[b] if key_lengths else k.size(2)
        here = {
            name: x[b : b + 1, :, :sq, :skv] if name != "sinks" else x for name, x in plain.items()
        }
        one = q[b : b + 1, :, :sq], k[b : b + 1, :, :skv]
        out[b, :, :sq] = attention(*one, v[b : b + 1, :, :skv], scale=SCALE, **here)[0]
        lse[b, :, :sq] = log_sum_exp(*one, scale=SCALE, **here)[0]
    return out, lse


def check(actual: Tensor, expected: Tensor, layout: str, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    expected = expected if layout == "BNSD" else to_layout(expected, layout)
    assert_close("out", actual.cpu(), expected, TOLERANCES[dtype])


def check_lse(actual: Tensor, expected: Tensor) -> None:
    assert_close("lse", actual.cpu(), expected, TOLERANCES[torch.float32])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_prompt(layout: str, dtype: torch.dtype) -> None:
    tensors = dense(dtype)
    mask = values(B, 1, SQ, SKV, seed=9) > 1
    lengths = {"actual_seq_lengths": [5, 7, 1], "actual_seq_lengths_kv": [20, 9, 4]}
    pse = values(B, N, SQ, SKV, seed=8).to(dtype)
    given = [to_layout(x, layout).npu() for x in tensors]
    for options, plain in (
        ({}, {}),
        ({"atten_mask": mask.npu(), "sparse_mode": 1}, {"kept": ~mask}),
        (lengths, dict(zip(("query_lengths", "key_lengths"), lengths.values(), strict=True))),
        ({"pse_shift": pse.npu()}, {"outer_bias": pse.double()}),
    ):
        out = torch_npu.npu_prompt_flash_attention(
            *given,
            num_heads=N,
            num_key_value_heads=NK,
            scale_value=SCALE,
            input_layout=layout,
            **options,
        )
        expected, _ = expected_of(tensors, **plain)
        check(out, expected, layout, dtype)


@pytest.mark.parametrize("mode", [2, 3, 4])
@each_fused
def test_sparse_modes(operator: Any, mode: int) -> None:
    tensors = dense(torch.float16)
    options = {"pre_tokens": 6, "next_tokens": 2, "sparse_mode": mode}
    options["atten_mask"] = compressed_mask(mode).npu()
    kept = kept_by_mode(mode, SQ, SKV, pre=6, next=2).expand(B, N, SQ, SKV)
    expected, lse = expected_of(tensors, kept=kept)
    given = [to_layout(x, "BSH").npu() for x in tensors]
    common = {"num_key_value_heads": NK, "input_layout": "BSH", **options}
    out, actual = operator(*given, num_heads=N, scale=SCALE, softmax_lse_flag=True, **common)
    check(out, expected, "BSH", torch.float16)
    check_lse(actual, lse)
    out = torch_npu.npu_prompt_flash_attention(*given, num_heads=N, scale_value=SCALE, **common)
    check(out, expected, "BSH", torch.float16)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@each_fused
def test_fused(operator: Any, layout: str, dtype: torch.dtype) -> None:
    tensors = dense(dtype)
    given_layout, _, out_layout = layout.partition("_")
    mask = values(B, 1, SQ, SKV, seed=9) > 1
    pse = values(1, N, SQ, SKV, seed=8).to(dtype)
    query_lengths, key_lengths = [5, 7, 1], [20, 9, 4]
    options = {
        "actual_seq_lengths": query_lengths,
        "actual_seq_lengths_kv": key_lengths,
        "atten_mask": mask.npu(),
        "pse_shift": pse.npu(),
        "num_heads": N,
        "num_key_value_heads": NK,
        "scale": SCALE,
        "input_layout": layout,
        "softmax_lse_flag": True,
    }
    given = [to_layout(x, given_layout).npu() for x in tensors]
    plain = {"kept": ~mask, "outer_bias": pse.double().expand(B, -1, -1, -1)}
    expected, lse = expected_of(tensors, query_lengths, key_lengths, **plain)
    out, actual = operator(*given, **options)
    check(out, expected, out_layout or given_layout, dtype)
    check_lse(actual, lse)
    without, nothing = operator(*given, **(options | {"softmax_lse_flag": False}))
    assert torch.equal(without.cpu(), out.cpu())
    assert nothing.numel() <= 1


def in_blocks(x: Tensor, block_size: int, form: str) -> tuple[Tensor, Tensor]:
    """A cache of (B, N, S, D) in blocks, in an order of their own, and the table of them."""
    batches, heads, length, size = x.shape
    per_batch = -(-length // block_size)
    padded = torch.nn.functional.pad(x, (0, 0, 0, per_batch * block_size - length))
    blocks = padded.view(batches, heads, per_batch, block_size, size).transpose(1, 2).flatten(0, 1)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    cache = torch.empty_like(blocks)
    cache[order] = blocks
    if form == "BBH":
        cache = cache.transpose(1, 2).flatten(2)
    elif form == "NZ":
        cache = cache.unflatten(3, (-1, 16)).transpose(2, 3).contiguous()
    return cache, order.view(batches, per_batch).int()


@pytest.mark.parametrize("form", ["BBH", "BNBD", "NZ"])
@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
@each_fused
def test_paged(operator: Any, layout: str, form: str) -> None:
    dtype = torch.float16
    tensors = dense(dtype, sq=1)
    caches = [in_blocks(x, 16, form) for x in tensors[1:]]
    key_lengths = [20, 3, 17]
    options = {
        "actual_seq_lengths_kv": key_lengths,
        "block_table": caches[0][1].npu(),
        "block_size": 16,
        "num_heads": N,
        "num_key_value_heads": NK,
        "scale": SCALE,
        "input_layout": layout,
        "softmax_lse_flag": True,
    }
    given = [to_layout(tensors[0], layout).npu(), *(x.npu() for x, _ in caches)]
    out, lse = operator(*given, **options)
    expected, expected_lse = expected_of(tensors, None, key_lengths)
    check(out, expected, layout, dtype)
    check_lse(lse, expected_lse)


@pytest.mark.parametrize("paged", [False, True])
@each_fused
def test_packed(operator: Any, paged: bool) -> None:
    dtype = torch.bfloat16
    tensors = dense(dtype)
    queries, keys = [5, 7, 1], [20, 9, 4]
    packed = [
        torch.cat([x[b, :, :length].transpose(0, 1) for b, length in enumerate(lengths)])
        for x, lengths in zip(tensors, (queries, keys, keys), strict=True)
    ]
    options: dict[str, Any] = {
        "actual_seq_lengths": list(accumulate(queries)),
        "actual_seq_lengths_kv": keys if paged else list(accumulate(keys)),
        "num_heads": N,
        "num_key_value_heads": NK,
        "scale": SCALE,
        "input_layout": "TND",
        "softmax_lse_flag": True,
        "sparse_mode": 3,
        "atten_mask": compressed_mask(3).npu(),
    }
    given = [x.npu() for x in packed]
    if paged:
        caches = [in_blocks(x, 16, "BBH") for x in tensors[1:]]
        given[1:] = [x.npu() for x, _ in caches]
        options |= {"block_table": caches[0][1].npu(), "block_size": 16}
    out, lse = operator(*given, **options)
    kept = torch.zeros(B, N, SQ, SKV, dtype=torch.bool)
    for b, (sq, skv) in enumerate(zip(queries, keys, strict=True)):
        kept[b, :, :sq, :skv] = kept_by_mode(3, sq, skv)
    expected, expected_lse = (
        torch.cat([x[b, :, :length].transpose(0, 1) for b, length in enumerate(queries)])
        for x in expected_of(tensors, queries, keys, kept=kept)
    )
    check(out, expected, "BNSD", dtype)
    check_lse(lse, expected_lse)


@each_fused
def test_ropes(operator: Any) -> None:
    """The absorbed form of multi-head latent attention: one key head, whose values are its keys."""
    dtype = torch.float16
    query, rope = (values(B, N, SQ, size, seed=size).to(dtype) for size in (512, 64))
    key, key_rope = (values(B, 1, SKV, size, seed=size + 1).to(dtype) for size in (512, 64))
    ropes = {"query_rope": rope.npu(), "key_rope": key_rope.npu()}
    given = [x.npu() for x in (query, key, key)]
    options = {"num_heads": N, "num_key_value_heads": 1, "scale": SCALE, "input_layout": "BNSD"}
    out, _ = operator(*given, **options, **ropes)
    whole = torch.cat([query, rope], -1), torch.cat([key, key_rope], -1), key
    expected, _ = expected_of(list(whole))
    check(out, expected, "BNSD", dtype)


def test_sinks() -> None:
    tensors, sinks = dense(torch.bfloat16), values(N, seed=5).bfloat16()
    options = {"num_heads": N, "num_key_value_heads": NK, "scale": SCALE, "input_layout": "BNSD"}
    out, lse = fused_v2(
        *(x.npu() for x in tensors), learnable_sink=sinks.npu(), softmax_lse_flag=True, **options
    )
    expected, expected_lse = expected_of(tensors, sinks=sinks.double())
    check(out, expected, "BNSD", torch.bfloat16)
    check_lse(lse, expected_lse)


def test_shared_prefix() -> None:
    tensors = dense(torch.float16)
    prefixes = [values(1, NK, 6, D, seed=i).half() for i in (5, 6)]
    options = {"num_heads": N, "num_key_value_heads": NK, "scale": SCALE, "input_layout": "BNSD"}
    names = ("key_shared_prefix", "value_shared_prefix")
    given = dict(zip(names, (x.npu() for x in prefixes), strict=True))
    out, _ = fused(*(x.npu() for x in tensors), actual_shared_prefix_len=[4], **given, **options)
    longer = [
        torch.cat([prefix[:, :, :4].expand(B, -1, -1, -1), x], 2)
        for prefix, x in zip(prefixes, tensors[1:], strict=True)
    ]
    check(out, expected_of([tensors[0], *longer])[0], "BNSD", torch.float16)


def test_rows_without_keys() -> None:
    tensors = dense(torch.float16)
    options = {"num_heads": N, "num_key_value_heads": NK, "scale": SCALE, "input_layout": "BNSD"}
    lengths = [0, 9, SKV]
    out, lse = fused(
        *(x.npu() for x in tensors),
        actual_seq_lengths_kv=lengths,
        softmax_lse_flag=True,
        **options,
    )
    assert not out.cpu()[0].any()
    assert (lse.cpu()[0] == torch.inf).all()
    later = [x[1:] for x in tensors]
    check(out[1:], expected_of(later, None, lengths[1:])[0], "BNSD", torch.float16)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_incremental(layout: str, dtype: torch.dtype) -> None:
    tensors = dense(dtype, sq=1)
    lengths = [20, 9, 4]
    mask = values(B, 1, 1, SKV, seed=9) > 1
    common = {
        "num_heads": N,
        "num_key_value_heads": NK,
        "scale_value": SCALE,
        "input_layout": layout,
    }
    query, *dense_cache = (to_layout(x, layout).npu() for x in tensors)
    operator = torch_npu.npu_incre_flash_attention
    with_mask = {"actual_seq_lengths": lengths, "atten_mask": mask.npu()}
    plain = {"key_lengths": lengths}
    out = operator(query, *dense_cache, **with_mask, **common)
    check(out, expected_of(tensors, **plain, kept=~mask)[0], layout, dtype)

    caches = [in_blocks(x, 16, "BBH") for x in tensors[1:]]
    blocks = {"block_table": caches[0][1].npu(), "block_size": 16, "actual_seq_lengths": lengths}
    out = operator(query, *(x.npu() for x, _ in caches), **blocks, **common)
    check(out, expected_of(tensors, **plain)[0], layout, dtype)


def test_keys_at_the_right() -> None:
    tensors, lengths, unused = dense(torch.float16, sq=1), [15, 9, 4], 3
    shifted = [torch.zeros_like(x) for x in tensors[1:]]
    for target, x in zip(shifted, tensors[1:], strict=True):
        for b, length in enumerate(lengths):
            target[b, :, SKV - unused - length : SKV - unused] = x[b, :, :length]
    out = torch_npu.npu_incre_flash_attention(
        tensors[0].npu(),
        *(x.npu() for x in shifted),
        actual_seq_lengths=lengths,
        kv_padding_size=torch.tensor([unused]).npu(),
        num_heads=N,
        num_key_value_heads=NK,
        scale_value=SCALE,
        input_layout="BNSD",
    )
    check(out, expected_of(tensors, None, lengths)[0], "BNSD", torch.float16)


def test_functions_called() -> None:
    tensors = [x.npu() for x in dense(torch.float16, sq=1)]
    options = {"num_heads": N, "num_key_value_heads": NK, "input_layout": "BNSD"}
    with cann_simulator.recorded_calls() as calls:
        for operator in (fused, fused_v2, torch_npu.npu_incre_flash_attention):
            operator(*tensors, **options)
    names = [x["function"] for x in calls if x.get("phase") == 1 and "Attention" in x["function"]]
    assert names == [
        "aclnnFusedInferAttentionScoreV3",
        "aclnnFusedInferAttentionScoreV4",
        "aclnnIncreFlashAttentionV4",
    ]
