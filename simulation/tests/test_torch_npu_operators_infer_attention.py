"""torch_npu's operators for inference on the simulated NPU: npu_prompt_flash_attention,
npu_incre_flash_attention, npu_fused_infer_attention_score and its _v2."""

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
from torch_npu_calls import HALF, SCALE, TOLERANCES, check, mask, paged, values

pytestmark = pytest.mark.usefixtures("no_leak")

B, N, NK, SQ, SKV, D = 3, 4, 2, 7, 20, 16
FUSED = "npu_fused_infer_attention_score"
PROMPT, INCREMENTAL = "npu_prompt_flash_attention", "npu_incre_flash_attention"
QUERY_LENGTHS, KEY_LENGTHS = [5, 7, 1], [20, 9, 4]
LENGTHS = {"actual_seq_lengths": QUERY_LENGTHS, "actual_seq_lengths_kv": KEY_LENGTHS}
SOME = values(B, 1, SQ, SKV, seed=9) > 1
# From the arguments of npu_fused_infer_attention_score.
NAMES: dict[str, dict[str, str]] = {
    f"{FUSED}_v2": {
        "num_heads": "num_query_heads", "scale": "softmax_scale",
        "actual_seq_lengths": "actual_seq_qlen", "actual_seq_lengths_kv": "actual_seq_kvlen",
        "softmax_lse_flag": "return_softmax_lse",
    },
    PROMPT: {"scale": "scale_value"},
    INCREMENTAL: {"scale": "scale_value", "actual_seq_lengths_kv": "actual_seq_lengths"},
}  # fmt: skip


def dense(dtype: torch.dtype = torch.float16, sq: int = SQ) -> list[Tensor]:
    """(B, N, S, D): query, key, value."""
    shapes = (B, N, sq, D), (B, NK, SKV, D), (B, NK, SKV, D)
    return [values(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]


def for_inference(operator: str, layout: str, **options: Any) -> dict[str, Any]:
    common = {"num_heads": N, "num_key_value_heads": NK, "scale": SCALE, "input_layout": layout}
    if operator.startswith(FUSED):
        common["softmax_lse_flag"] = True
    names = NAMES.get(operator, {})
    return {names.get(name, name): x for name, x in (common | options).items()}


def check_inference(
    operator: str, layout: str, tensors: list[Tensor], given: Any = None, **options: Any
) -> None:
    """`tensors` of (B, N, S, D), or `given` ones in the layout."""
    given = given or [to_layout(x, layout.partition("_")[0]) for x in tensors]
    check(operator, *given, **for_inference(operator, layout, **options))


def check_fused(operator: str, layout: str, dtype: torch.dtype) -> None:
    check_inference(operator, layout, dense(dtype), atten_mask=SOME, **LENGTHS)


each_fused = pytest.mark.parametrize("operator", [FUSED, f"{FUSED}_v2"])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_prompt(layout: str, dtype: torch.dtype) -> None:
    for options in ({}, {"atten_mask": SOME, "sparse_mode": 1}, LENGTHS):
        check_inference(PROMPT, layout, dense(dtype), **options)


@pytest.mark.parametrize("mode", [2, 3, 4])
@pytest.mark.parametrize("operator", [FUSED, f"{FUSED}_v2", PROMPT])
def test_sparse_modes_of_inference(operator: str, mode: int) -> None:
    options = {"pre_tokens": 6, "next_tokens": 2, "sparse_mode": mode, "atten_mask": mask(mode)}
    check_inference(operator, "BSH", dense(), **options)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
@each_fused
def test_fused(operator: str, layout: str, dtype: torch.dtype) -> None:
    check_fused(operator, layout, dtype)


@each_fused
def test_without_lse(operator: str) -> None:
    tensors = [x.npu() for x in dense()]
    (same, _), (out, nothing) = (
        getattr(torch_npu, operator)(*tensors, **for_inference(operator, "BNSD", **options))
        for options in ({}, {"softmax_lse_flag": False})
    )
    assert torch.equal(out.cpu(), same.cpu())
    assert nothing.numel() <= 1


@pytest.mark.parametrize("form", ["BBH", "BNBD", "NZ"])
@pytest.mark.parametrize("layout", ["BSH", "BNSD"])
@each_fused
def test_paged(operator: str, layout: str, form: str) -> None:
    query, *keys = dense(sq=1)
    caches, options = paged(keys, form)
    options |= {"actual_seq_lengths_kv": [20, 3, 17], "block_size": 16}
    check_inference(operator, layout, [], [to_layout(query, layout), *caches], **options)


@pytest.mark.parametrize("in_pages", [False, True])
@each_fused
def test_packed(operator: str, in_pages: bool) -> None:
    tensors = dense(torch.bfloat16)
    options = {"actual_seq_lengths": list(accumulate(QUERY_LENGTHS)), "sparse_mode": 3}
    options |= {"actual_seq_lengths_kv": list(accumulate(KEY_LENGTHS)), "atten_mask": mask(3)}
    given = [
        torch.cat([x[b, :, :length].transpose(0, 1) for b, length in enumerate(lengths)])
        for x, lengths in zip(tensors, (QUERY_LENGTHS, KEY_LENGTHS, KEY_LENGTHS), strict=True)
    ]
    if in_pages:
        given[1:], more = paged(tensors[1:], "BBH")
        options |= {**more, "block_size": 16, "actual_seq_lengths_kv": KEY_LENGTHS}
    check_inference(operator, "TND", [], given, **options)


@each_fused
def test_ropes(operator: str) -> None:
    """The absorbed form of multi-head latent attention: one key head, whose values are its keys."""
    query, rope = (values(B, N, SQ, size, seed=size).half() for size in (512, 64))
    key, key_rope = (values(B, 1, SKV, size, seed=size + 1).half() for size in (512, 64))
    options = {"query_rope": rope, "key_rope": key_rope, "num_key_value_heads": 1}
    check_inference(operator, "BNSD", [query, key, key], **options)


def test_sinks_and_rows_without_keys() -> None:
    sinks = values(N, seed=5).bfloat16()
    check_inference(f"{FUSED}_v2", "BNSD", dense(torch.bfloat16), learnable_sink=sinks)
    check_inference(FUSED, "BNSD", dense(), actual_seq_lengths_kv=[0, 9, SKV])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_incremental(layout: str, dtype: torch.dtype) -> None:
    tensors = dense(dtype, sq=1)
    lengths = {"actual_seq_lengths_kv": KEY_LENGTHS}
    check_inference(INCREMENTAL, layout, tensors, atten_mask=SOME[:, :, :1], **lengths)
    caches, options = paged(tensors[1:], "BBH")
    given = [to_layout(tensors[0], layout), *caches]
    check_inference(INCREMENTAL, layout, [], given, block_size=16, **options, **lengths)


def computed(operator: str, tensors: list[Tensor], **options: Any) -> Tensor:
    on_npu = {name: x.npu() if isinstance(x, Tensor) else x for name, x in options.items()}
    call = for_inference(operator, "BNSD", **on_npu)
    results = getattr(torch_npu, operator)(*(x.npu() for x in tensors), **call)
    return (results[0] if operator.startswith(FUSED) else results).cpu()


@pytest.mark.parametrize("operator", [FUSED, f"{FUSED}_v2", PROMPT])
def test_pse_of_inference(operator: str) -> None:
    tensors, pse = dense(), values(B, N, SQ, SKV, seed=8).half()
    expected = attention(*tensors, None, SCALE, pse.double())[0]
    out = computed(operator, tensors, pse_shift=pse)
    assert_close("out", out, expected, TOLERANCES[torch.float16])


def test_shared_prefix() -> None:
    query, *keys = tensors = dense()
    prefixes = [values(1, NK, 6, D, seed=i).half() for i in (5, 6)]
    options = {"key_shared_prefix": prefixes[0], "value_shared_prefix": prefixes[1]}
    longer = [
        torch.cat([prefix[:, :, :4].expand(B, -1, -1, -1), x], 2)
        for prefix, x in zip(prefixes, keys, strict=True)
    ]
    expected = attention(query, *longer, scale=SCALE)[0]
    options |= {"actual_shared_prefix_len": [4], "softmax_lse_flag": False}
    assert_close("out", computed(FUSED, tensors, **options), expected, TOLERANCES[torch.float16])


def test_keys_at_the_right() -> None:
    query, *keys = dense(sq=1)
    lengths, unused = [15, 9, 4], 3
    shifted = [torch.zeros_like(x) for x in keys]
    for target, x in zip(shifted, keys, strict=True):
        for b, length in enumerate(lengths):
            target[b, :, SKV - unused - length : SKV - unused] = x[b, :, :length]
    options = {"actual_seq_lengths_kv": lengths, "kv_padding_size": torch.tensor([unused])}
    kept = torch.arange(SKV) < torch.tensor(lengths).view(-1, 1, 1, 1)
    expected = attention(query, *keys, kept, SCALE)[0]
    out = computed(INCREMENTAL, [query, *shifted], **options)
    assert_close("out", out, expected, TOLERANCES[torch.float16])


def test_functions_called() -> None:
    with cann_simulator.recorded_calls() as calls:
        for operator in (FUSED, f"{FUSED}_v2", INCREMENTAL):
            check_inference(operator, "BNSD", dense(sq=1))
    names = [x["function"] for x in calls if x.get("phase") == 1 and "Attention" in x["function"]]
    versions = "FusedInferAttentionScoreV3", "FusedInferAttentionScoreV4", "IncreFlashAttentionV4"
    assert names == [f"aclnn{x}" for x in versions]
