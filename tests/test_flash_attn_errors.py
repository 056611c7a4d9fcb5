"""Wrong arguments of flash-attn's functions: one line that names the argument, nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_attn_ops.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    register_flash_attention_impl,
)
from torch import Tensor

CU = torch.tensor([0, 4, 9], dtype=torch.int32)
NOT_IMPLEMENTED, TYPE, VALUE = NotImplementedError, TypeError, ValueError


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


def func() -> dict[str, Any]:
    return {"q": bf16(2, 5, 4, 16), "k": bf16(2, 7, 2, 16), "v": bf16(2, 7, 2, 16)}


def varlen() -> dict[str, Any]:
    return {
        "q": bf16(9, 4, 16), "k": bf16(9, 2, 16), "v": bf16(9, 2, 16),
        "cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 5, "max_seqlen_k": 5,
    }  # fmt: skip


def kvcache() -> dict[str, Any]:
    return {
        "q": bf16(2, 1, 4, 16), "k_cache": bf16(2, 8, 2, 16), "v_cache": bf16(2, 8, 2, 16),
        "k": bf16(2, 1, 2, 16), "v": bf16(2, 1, 2, 16),
        "cache_seqlens": torch.tensor([3, 5], dtype=torch.int32), "causal": True,
    }  # fmt: skip


FUNCTIONS: dict[Callable[..., Any], Callable[[], dict[str, Any]]] = {
    flash_attn_func: func, flash_attn_varlen_func: varlen, flash_attn_with_kvcache: kvcache,
}  # fmt: skip

# Errors of all three functions.
COMMON: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"softcap": 30.0}, NOT_IMPLEMENTED, "softcap: expected 0"),
    ({"q": None}, TYPE, "q: expected a tensor, got NoneType"),
    ({"q": "a\nb"}, TYPE, "q: expected a tensor, got str"),
    ({"q": bf16(4, 16)}, VALUE, r"q: expected shape \(.*, nheads, headdim\), got \[4, 16\]"),
    ({"window_size": 3}, VALUE, r"window_size: expected \(left, right\), got 3"),
    ({"window_size": (-2, 0)}, VALUE, r"window_size: expected -1.* got \(-2, 0\)"),
    ({"window_size": (2**70, 0)}, VALUE, r"window_size: expected -1.* or more, got \(1180"),
    ({"window_size": "ab"}, TYPE, "window_size: expected .* whole numbers, got 'ab'"),
    ({"window_size": (torch.ones(2), 1)}, TYPE, "window_size: expected .* whole numbers, got"),
    ({"softcap": "a"}, TYPE, "softcap: expected a number, got 'a'"),
    ({"softcap": torch.ones(2)}, TYPE, "softcap: expected a number, got a tensor of float32"),
    ({"softmax_scale": [1]}, TYPE, r"softmax_scale: expected a number, got \[1\]"),
    ({"causal": "no"}, TYPE, "causal: expected a bool, got 'no'"),
    ({"causal": torch.ones(2)}, TYPE, "causal: expected a bool, got a tensor"),
    ({"alibi_slopes": 3}, TYPE, "alibi_slopes: expected a tensor or None, got int"),
    ({"alibi_slopes": 1j * torch.ones(4)}, TYPE, "float32"),
    ({"alibi_slopes": torch.ones(4, dtype=torch.bfloat16)}, TYPE, "float32"),
    ({"alibi_slopes": torch.ones(3)}, VALUE, "slopes of shape"),
    ({"s_aux": 3}, TYPE, "s_aux: expected a tensor or None, got int"),
    ({"learnable_sink": [0.0] * 4}, TYPE, "learnable_sink: expected a tensor or None"),
    ({"s_aux": torch.ones(4), "learnable_sink": torch.ones(4)}, VALUE,
     "learnable_sink: expected None beside s_aux"),
    ({"s_aux": torch.ones(2)}, VALUE, r"sink: expected shape \(4\), one .*, got \[2\]"),
    ({"learnable_sink": torch.ones(4).long()}, TYPE, "sink: expected a floating-point dtype"),
    ({"s_aux": torch.ones(4, device="meta")}, VALUE, r"(s_aux|sink): expected device cpu"),
]  # fmt: skip
WRONG: dict[Callable[..., Any], list[tuple[dict[str, Any], type[Exception], str]]] = {
    flash_attn_func: [
        ({"k": bf16(2, 7, 3, 16)}, VALUE, "value: expected key's heads|key: expected a"),
        ({"k": bf16(2, 7, 2, 8)}, VALUE, "key: expected query's D = 16"),
        ({"k": bf16(1, 7, 2, 16)}, VALUE, "key: expected query's batch size 2"),
        ({"v": bf16(2, 7, 2, 16).half()}, TYPE, "value: expected dtype bfloat16"),
        ({"v": bf16(2, 6, 2, 16)}, VALUE, "value: expected as many tokens as key"),
        ({"dropout_p": 1.0}, VALUE, r"dropout_p: expected a probability in \[0, 1\)"),
        ({"dropout_p": "a"}, TYPE, "dropout_p: expected a number, got 'a'"),
        ({"dropout_p": None, "return_attn_probs": True}, TYPE, "dropout_p: expected a number"),
        ({"return_attn_probs": torch.ones(2)}, TYPE, "return_attn_probs: expected a bool"),
        ({"k": None}, TYPE, "k: expected a tensor, got NoneType"),
        ({"dropout_p": 0.1, "return_attn_probs": True}, NOT_IMPLEMENTED, "return_attn_probs"),
        ({"q": torch.ones(2, 5, 4, 16, dtype=torch.int32)}, TYPE, "query: expected dtype"),
    ],
    flash_attn_varlen_func: [
        ({"cu_seqlens_q": None}, TYPE, "cu_seqlens_q: expected a tensor, or its values"),
        ({"cu_seqlens_q": CU.float()}, TYPE, "func: cu_seqlens_q: expected whole numbers"),
        ({"cu_seqlens_k": CU[None]}, VALUE, r"cu_seqlens_k: expected shape \(batch_size \+ 1,\)"),
        ({"cu_seqlens_k": CU[1:]}, VALUE, r"cu_seqlens_k: .* first is 0 .*, got \[4, 9\]"),
        ({"cu_seqlens_q": "ab"}, TYPE, "cu_seqlens_q: expected a tensor, or its .* got str"),
        ({"cu_seqlens_q": [0, 4.0, 9]}, TYPE, "cu_seqlens_q: expected whole numbers"),
        ({"cu_seqlens_q": (0, 2**70)}, VALUE, "cu_seqlens_q: expected numbers of 64 bits"),
        ({"cu_seqlens_q": CU.to("meta")}, VALUE, "cu_seqlens_q: expected a tensor on the host"),
        ({"cu_seqlens_k": list(range(5000, 0, -1))}, VALUE, r"cu_seqlens_k: .* got .*\.\.\.$"),
        ({"block_table": [[1]], "k": bf16(3, 4, 2, 16), "v": bf16(3, 4, 2, 16)}, TYPE,
         "block_table: expected a tensor, got list"),
        ({"block_table": torch.zeros(2, 2, dtype=torch.int32), "k": bf16(3, 4, 2, 16),
          "v": bf16(2, 4, 2, 16)}, VALUE, r"v: expected the 3 blocks of 4 .* got \[2, 4, 2, 16\]"),
        ({"cu_seqlens_q": [0]}, VALUE, r"cu_seqlens_q: expected the batch_size \+ 1"),
        ({"cu_seqlens_q": [0, 5, 3, 9], "cu_seqlens_k": [0, 1, 2, 9]}, VALUE,
         "^flash_attn_varlen_func: cu_seqlens_q: .* never decrease, got 3 after 5 at 2 "),
        ({"cu_seqlens_q": [0, 4, 10]}, VALUE, "cu_seqlens_q: .* at most T = 9, got 10 at 2 "),
        ({"cu_seqlens_k": [0, 4, 5, 9]}, VALUE,
         "cu_seqlens_k: expected as many lengths as cu_seqlens_q, 2, got 3"),
        ({"alibi_slopes": torch.ones(4), "cu_seqlens_k": [0, 6, 9]}, NOT_IMPLEMENTED,
         r"alibi_slopes: expected causal attention, or one .*, got \[-2, 2\]"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, VALUE, "k: expected shape"),
        ({"out": bf16(9, 4, 8)}, VALUE, r"out: expected a tensor of bfloat16 \[9, 4, 16\], got"),
        ({"block_table": CU[:2, None], "cu_seqlens_k": [0, 8, 9], "k": bf16(3, 4, 2, 16),
          "v": bf16(3, 4, 2, 16)}, VALUE, r"block_table: expected shape \(2, 2\).* got \[2, 1\]"),
    ],
    flash_attn_with_kvcache: [
        ({"rotary_cos": bf16(8, 8)}, NOT_IMPLEMENTED, "rotary_cos: expected None"),
        ({"rotary_sin": bf16(8, 8)}, NOT_IMPLEMENTED, "rotary_sin: expected None"),
        ({"cache_leftpad": CU}, NOT_IMPLEMENTED, "cache_leftpad: expected None"),
        ({"alibi_slopes": torch.ones(4), "causal": False}, NOT_IMPLEMENTED,
         r"alibi_slopes: expected causal attention, or one .*, got \[3, 5\]"),
        ({"v": None}, TYPE, "v: expected a tensor, got NoneType"),
        ({"cache_seqlens": None}, VALUE, "cache_seqlens: expected where k and v are written"),
        ({"cache_seqlens": 8}, VALUE, r"cache_seqlens: expected 0\.\.7, .* got 8"),
        ({"cache_seqlens": -1}, VALUE, r"cache_seqlens: expected 0\.\.7, .* got -1"),
        ({"cache_seqlens": CU[:2] * 0 + 8}, VALUE, r"cache_seqlens: expected 0\.\.7, .* got 8"),
        ({"cache_seqlens": 1.5}, TYPE, "cache_seqlens: expected an int or a tensor, got float"),
        ({"cache_seqlens": [3, 5]}, TYPE, "cache_seqlens: expected an int or a tensor, got list"),
        ({"cache_seqlens": CU[1:].to("meta")}, VALUE, "cache_seqlens: .* on the host or on cpu"),
        ({"return_softmax_lse": torch.ones(2)}, TYPE, "return_softmax_lse: expected a bool"),
        ({"cache_seqlens": CU}, VALUE, r"cache_seqlens: expected shape \(2,\), got \[3\]"),
        ({"cache_seqlens": CU[:2].float()}, TYPE, "cache_seqlens: expected dtype int32"),
        ({"q": bf16(3, 1, 4, 16), "k": None, "v": None}, VALUE, "k_cache: expected a row for"),
        ({"q": bf16(3, 1, 4, 16), "cache_seqlens": 3}, VALUE, r"k: expected shape \(3, 1,"),
        ({"q": bf16(3, 1, 4, 16), "cache_seqlens": CU}, VALUE, r"k: expected shape \(3, 1,"),
        ({"k": bf16(1, 1, 2, 16), "v": bf16(1, 1, 2, 16), "cache_seqlens": 3}, VALUE,
         r"k: expected shape \(2, 1, .*got \[1, 1, 2, 16\]"),
        ({"k": bf16(2, 3, 2, 16), "v": bf16(3, 2, 2, 16)}, VALUE, r"v: expected shape \(2, 3,"),
        ({"block_table": CU[:2, None] - 1}, VALUE, r"block_table: expected 0\.\.1 .* got -1"),
        ({"cache_batch_idx": CU[:2] - 1}, VALUE, r"cache_batch_idx: expected 0\.\.1, got \[-1, "),
        ({"cache_batch_idx": torch.ones(2)}, TYPE, "cache_batch_idx: expected dtype int32"),
        ({"alibi_slopes": -torch.ones(4), "cache_seqlens": 3}, VALUE, "alibi_slopes: .*positive"),
        ({"block_table": torch.zeros(2, 1)}, TYPE, "block_table: .* int32 or .* got float"),
        ({"cache_batch_idx": CU}, VALUE, r"cache_batch_idx: expected shape \(2,\)"),
        ({"cache_batch_idx": CU[:2], "block_table": CU[None, :2]}, VALUE, "beside block_table"),
        ({"k": bf16(2, 1, 3, 16)}, VALUE, "scatter_pa_kv_cache_: "),
        ({"k": bf16(2, 1, 2, 16).half()}, TYPE, "scatter_pa_kv_cache_: "),
        ({"v_cache": bf16(2, 8, 4, 16)}, VALUE, "value: expected key's heads"),
        ({"k_cache": bf16(2, 8, 2, 8)}, VALUE, "key: expected query's D = 16"),
        ({"k_cache": bf16(2, 8, 2, 32)[..., ::2]}, VALUE, "key_cache"),
    ],
}  # fmt: skip
CASES = [
    pytest.param(function, *case, id=f"{function.__name__}-{index}")
    for function, cases in WRONG.items()
    for index, case in enumerate((*COMMON, *cases))
]


@pytest.mark.parametrize(("function", "change", "kind", "message"), CASES)
def test_wrong_arguments(
    function: Callable[..., Any], change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    arguments = FUNCTIONS[function]() | change
    caches = [arguments[name] for name in ("k_cache", "v_cache") if name in arguments]
    before = [x.clone() for x in caches]
    with pytest.raises(kind, match=message) as caught:
        function(**arguments)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert all(map(torch.equal, caches, before))


def test_the_name_that_torch_registers() -> None:
    with pytest.raises(TypeError, match=r"^register_flash_attention_impl: impl: .* got int"):
        register_flash_attention_impl(3)  # type: ignore[arg-type]


def test_deterministic_is_what_the_cpu_is() -> None:
    arguments = func()
    out = flash_attn_func(**arguments, deterministic=True)
    assert torch.equal(out, flash_attn_func(**arguments))
