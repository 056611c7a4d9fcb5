"""An argument that is not computed is an error that names it; none is dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend_attn_ops.torch_npu.schemas import SCHEMAS
from ascend_attn_ops.torch_npu.table import TABLE
from support.npu_names import SQUARE, torch_npu
from torch import Tensor


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


QUERY, KEY = bf16(2, 5, 4, 64), bf16(2, 7, 2, 64)
DENSE = {"query": QUERY, "key": KEY, "value": KEY}
FUSION = {**DENSE, "head_num": 4, "input_layout": "BSND"}
STATISTICS = {"softmax_max": torch.zeros(2, 4, 5, 8), "softmax_sum": torch.ones(2, 4, 5, 8)}
FUSION_GRAD = {**FUSION, "dy": QUERY, **STATISTICS, "attention_in": QUERY}
PACKED_GRAD = {
    "query": QUERY[0], "key": KEY[0], "value": KEY[0], "head_num": 4, "input_layout": "TND",
    "dy": QUERY[0], "attention_in": QUERY[0], "softmax_layout": "TND", "actual_seq_qlen": [3, 5],
    "actual_seq_kvlen": [3, 7], "softmax_max": torch.zeros(5, 4, 8),
    "softmax_sum": torch.ones(5, 4, 8),
}  # fmt: skip
INFERENCE = {**DENSE, "num_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND"}
STEP = {**INFERENCE, "query": QUERY[:, :1]}
INFERENCE_2 = {**DENSE, "num_query_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND"}
SPARSE = {
    "query": bf16(1, 3, 16, 512), "key": bf16(1, 3, 1, 512), "value": bf16(1, 3, 1, 512),
    "sparse_indices": torch.zeros(1, 3, 1, 2048, dtype=torch.int32), "scale_value": 0.1,
    "query_rope": bf16(1, 3, 16, 64), "key_rope": bf16(1, 3, 1, 64), "attention_mode": 2,
}  # fmt: skip
SPARSE_GRAD = {
    **SPARSE, "d_out": SPARSE["query"], "out": SPARSE["query"], "sparse_block_size": 1,
    "softmax_max": torch.zeros(1, 1, 3, 16), "softmax_sum": torch.ones(1, 1, 3, 16),
}  # fmt: skip
INT8 = {
    **{x: SPARSE[x] for x in ("sparse_indices", "scale_value", "attention_mode")},
    **dict.fromkeys(("key", "value"), torch.zeros(1, 3, 1, 656, dtype=torch.int8)),
    "query": bf16(1, 3, 16, 576), "key_quant_mode": 2, "value_quant_mode": 2,
}  # fmt: skip
INDEXER = {"query": bf16(1, 3, 8, 128), "key": bf16(1, 3, 1, 128), "weights": bf16(1, 3, 8)}
INDEXER_GRAD = {
    **INDEXER, "dy": bf16(1, 3, 1, 4), "sparse_indices": torch.zeros(1, 3, 1, 4, dtype=torch.int32)
}  # fmt: skip
BYTES = torch.zeros(1, 3, 64, 128, dtype=torch.int8)
INT8_INDEXER = {
    "query": BYTES, "key": BYTES[:, :, :1], "weights": torch.ones(1, 3, 64).half(),
    "query_dequant_scale": torch.ones(1, 3, 64).half(), "query_quant_mode": 0, "key_quant_mode": 0,
    "key_dequant_scale": torch.ones(1, 3, 1).half(),
}  # fmt: skip
LOSS = {
    **{x: SPARSE[x] for x in SPARSE if x not in ("value", "attention_mode")},
    **{x: SPARSE_GRAD[x] for x in ("softmax_max", "softmax_sum")},
    "query_index": bf16(1, 3, 8, 128), "key_index": bf16(1, 3, 1, 128), "weights": bf16(1, 3, 8),
}  # fmt: skip
NO_ROPES = {"query_rope": None, "key_rope": None}
ROTARY = {"input": bf16(1, 3, 4, 64), "r1": bf16(1, 3, 1, 64), "r2": bf16(1, 3, 1, 64)}
LSE = {"lse": [torch.zeros(4)] * 2, "local_out": [torch.ones(4, 8)] * 2}
RING = {
    f"{part}_{x}": torch.ones(shape)
    for part in ("prev", "cur")
    for x, shape in (("attn_out", (5, 2, 32)), ("softmax_max", (2, 4, 5, 8)),
                     ("softmax_sum", (2, 4, 5, 8)))
}  # fmt: skip
PACKED_RING = {name: torch.ones(5, 4, 8) for name in RING}

MLA = {
    "q": bf16(1, 3, 64, 512), "ori_kv": bf16(1, 3, 1, 512), "sinks": torch.zeros(64),
    "layout_kv": "BSND",
}  # fmt: skip
MLA_GRAD = {**MLA, "dout": MLA["q"], "attn_out": MLA["q"], "softmax_lse": torch.zeros(1, 1, 3, 64)}
CMP_INDEXER = {
    "q": bf16(1, 3, 8, 128), "k": bf16(1, 3, 1, 128), "w": torch.rand(1, 3, 8), "topk": 512
}  # fmt: skip
CANN = "cann_ops_transformer::"

# A call of every operator that takes more than it follows, of torch_npu unless it says another.
CALLS: dict[str, dict[str, Any]] = {
    **{f"npu_fusion_attention{x}": FUSION for x in ("", "_v2", "_v3")},
    **{f"npu_fusion_attention_grad{x}": FUSION_GRAD for x in ("", "_v2", "_v3")},
    "npu_prompt_flash_attention": INFERENCE,
    "npu_incre_flash_attention": STEP,
    "npu_fused_infer_attention_score": INFERENCE,
    "npu_fused_infer_attention_score_v2": INFERENCE_2,
    "npu_fused_infer_attention_score.out": {**INFERENCE, "out": [QUERY, QUERY]},
    "npu_fused_infer_attention_score_v2.out": {**INFERENCE_2, "out": [QUERY, QUERY]},
    "npu_sparse_flash_attention": SPARSE,
    "npu_kv_quant_sparse_flash_attention": INT8,
    "_C_ascend::npu_kv_quant_sparse_flash_attention": INT8,
    "npu_quant_lightning_indexer": INT8_INDEXER,
    "npu_sparse_lightning_indexer_grad_kl_loss": LOSS,
    "npu_rotary_mul": ROTARY,
    "_C_ascend::npu_sparse_attn_sharedkv": MLA,
    f"{CANN}lightning_indexer": CMP_INDEXER,
    f"{CANN}sparse_flash_mla": MLA,
    f"{CANN}sparse_flash_mla_grad": MLA_GRAD,
}
# Arguments of these types, with a value that is not the default.
ANOTHER: dict[str, Any] = {
    "Optional[Tensor]": torch.ones(1), "int": 3, "Optional[int]": 3, "bool": True, "str": "TND",
    "Optional[List[int]]": [1],
}  # fmt: skip


def qualified(name: str) -> str:
    return name if "::" in name else f"npu::{name}"


def operator(name: str) -> Any:
    namespace, _, rest = qualified(name).partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def not_followed(name: str) -> list[tuple[str, str]]:
    """The arguments that the row does not follow, and their types."""
    row = next(x for x in TABLE if x.name == qualified(name))
    arguments = operator(name)._schema.arguments
    left_out = [
        x for x in arguments if not row.follows(x.name) and x.name not in row.without_effect
    ]
    return [(x.name, str(x.type)) for x in left_out]


CASES = [(name, argument, kind) for name in CALLS for argument, kind in not_followed(name)]


@pytest.mark.parametrize(("name", "argument", "kind"), CASES)
def test_arguments_that_are_not_computed(name: str, argument: str, kind: str) -> None:
    call = {**CALLS[name], argument: ANOTHER[kind]}
    with pytest.raises(NotImplementedError, match=f"^{qualified(name)}: {argument}: expected "):
        operator(name)(**call)


def test_every_operator_is_among_them_or_follows_all() -> None:
    assert {name for name in SCHEMAS if not_followed(name)} == set(map(qualified, CALLS))


# Values of arguments that are followed.
CACHE = bf16(2, 16, 128)
PAGES = {"block_table": torch.zeros(2, 1, dtype=torch.int32), "block_size": 16}
WRONG: list[tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ("npu_fusion_attention", FUSION, {"sparse_mode": 1}, ValueError, "atten_mask: expected"),
    ("npu_fusion_attention", FUSION, {"seed": 4}, NotImplementedError, "seed: expected 0"),
    ("npu_fusion_attention", FUSION, {"keep_prob": 0.0}, ValueError, "keep_prob: expected"),
    ("npu_fusion_attention", FUSION, {"sink": torch.zeros(2)}, ValueError,
     r"sink: expected shape \(4\)"),
    ("npu_fusion_attention", FUSION, {"softmax_layout": "TND"}, ValueError,
     "softmax_layout: expected '', or 'TND' in input_layout TND, got 'TND' in input_layout BSND"),
    ("npu_fusion_attention_v3", FUSION, {"softmax_layout": "NTD"}, ValueError,
     "softmax_layout: expected '', or 'TND' in input_layout TND, got 'NTD'"),
    ("npu_fusion_attention_grad_v2", FUSION_GRAD, {"softmax_layout": "TND"}, ValueError,
     "softmax_layout: expected"),
    ("npu_fusion_attention_grad", PACKED_GRAD, {"actual_seq_qlen": [3, 9]}, ValueError,
     "actual_seq_lengths_query: expected"),
    ("npu_fusion_attention_grad", PACKED_GRAD, {"softmax_sum": torch.ones(5, 32)}, ValueError,
     "softmax_sum: expected"),
    ("npu_fusion_attention_grad", FUSION_GRAD, {"softmax_in": QUERY}, NotImplementedError,
     "softmax_in: expected"),
    ("npu_fusion_attention_grad", FUSION_GRAD, {"softmax_max": None}, ValueError, "softmax_max"),
    ("npu_fusion_attention_grad", FUSION_GRAD, {"keep_prob": 0.5}, ValueError, "seed: expected"),
    ("npu_fusion_attention_grad_v3", FUSION_GRAD, {"keep_prob": 0.5}, ValueError, "seed: expected"),
    ("npu_prompt_flash_attention", INFERENCE, {"input_layout": "TND"}, NotImplementedError,
     "input_layout: expected one of BSH"),
    ("npu_incre_flash_attention", STEP, {"query": QUERY}, ValueError, "query: expected one token"),
    ("npu_incre_flash_attention", STEP, {"input_layout": "TND"}, NotImplementedError,
     "input_layout: expected"),
    ("npu_incre_flash_attention", STEP, {"key": KEY.char()}, NotImplementedError, "key: expected"),
    ("npu_fused_infer_attention_score", INFERENCE, {"query": QUERY.char()}, NotImplementedError,
     "query: expected float16 or bfloat16, got a tensor of int8"),
    ("npu_fused_infer_attention_score_v2", INFERENCE_2, {"learnable_sink": torch.zeros(4)},
     NotImplementedError, "learnable_sink: expected float16 or bfloat16, got .* float32"),
    ("npu_fused_infer_attention_score", INFERENCE, {"input_layout": "SBH"}, NotImplementedError,
     "input_layout: expected one of"),
    ("npu_fused_infer_attention_score", INFERENCE, {"sparse_mode": 5}, NotImplementedError,
     "sparse_mode: expected one of 0, 1, 2, 3, 4, got 5"),
    ("npu_fused_infer_attention_score", INFERENCE, {"sparse_mode": 1}, ValueError,
     "atten_mask: expected a full mask for sparse_mode 1"),
    ("npu_fused_infer_attention_score", INFERENCE, {"atten_mask": SQUARE[:4]}, ValueError,
     "atten_mask: expected"),
    ("npu_fused_infer_attention_score", INFERENCE, {**PAGES, "key": CACHE, "value": CACHE},
     ValueError, "actual_seq_lengths_key: expected"),
    ("npu_fused_infer_attention_score", INFERENCE, {**PAGES, "actual_seq_lengths_kv": [3, 4]},
     ValueError, "key: expected"),
    ("npu_fused_infer_attention_score", INFERENCE, {**PAGES, "pse_shift": QUERY},
     NotImplementedError, "block_table: expected None beside pse_shift, got"),
    ("npu_fused_infer_attention_score", INFERENCE, {"input_layout": "TND", "pse_shift": QUERY},
     NotImplementedError, "pse_shift: expected None in layout TND, got"),
    ("npu_fused_infer_attention_score.out", INFERENCE, {"out": [QUERY]}, ValueError,
     "out: expected two tensors, got 1"),
    ("npu_fused_infer_attention_score.out", INFERENCE, {"out": [KEY, KEY]}, ValueError,
     r"out: expected a tensor of bfloat16 \[2, 5, 4, 64\], got .* \[2, 7, 2, 64\]"),
    (f"{CANN}sparse_flash_mla", MLA, {"layout_q": "TND", "seqused_q": torch.ones(1).int()},
     NotImplementedError, "seqused_q: expected None in layout TND, got"),
    (f"{CANN}sparse_flash_mla", {**MLA, "layout_kv": "TND"},
     {"cu_seqlens_ori_kv": torch.tensor([1, 3])}, ValueError, "cu_seqlens_ori_kv: expected the "),
    (f"{CANN}sparse_flash_mla_grad", MLA_GRAD, {"layout_kv": "TND"}, NotImplementedError,
     "layout_kv: expected layout_q, BSND, got 'TND'"),
    ("npu_sparse_flash_attention", SPARSE, {"attention_mode": 0}, NotImplementedError,
     "attention_mode: expected 2, got 0"),
    ("npu_kv_quant_sparse_flash_attention", INT8, {"attention_mode": 0}, NotImplementedError,
     "attention_mode: expected 2, got 0"),
    ("_C_ascend::npu_kv_quant_sparse_flash_attention", INT8, {"return_softmax_lse": True},
     NotImplementedError, "return_softmax_lse: expected False, got True"),
    ("npu_sparse_flash_attention", SPARSE, {"value": None}, NotImplementedError, "value: expected"),
    ("npu_sparse_flash_attention", SPARSE, {"layout_kv": "TND"}, NotImplementedError,
     "layout_kv: expected PA_BSND or layout_query, BSND, got 'TND'"),
    ("npu_sparse_flash_attention", SPARSE, {"query": bf16(1, 3, 16, 512).requires_grad_()},
     ValueError, "return_softmax_lse: expected True"),
    ("npu_sparse_flash_attention", SPARSE, NO_ROPES, ValueError,
     "query_rope: expected a tensor, without which CANN refuses the call, got None"),
    ("npu_sparse_lightning_indexer_grad_kl_loss", LOSS, NO_ROPES, ValueError,
     "query_rope: expected a tensor, without which CANN refuses the call, got None"),
    ("npu_sparse_flash_attention_grad", SPARSE_GRAD, {"attention_mode": 0}, NotImplementedError,
     "attention_mode"),
    ("npu_sparse_lightning_indexer_grad_kl_loss", LOSS, {"next_tokens": 3}, NotImplementedError,
     "next_tokens: expected"),
    ("npu_lightning_indexer", INDEXER, {"layout_key": "PA_BSND", "return_value": True},
     NotImplementedError, "return_value: expected False"),
    ("npu_lightning_indexer_grad", INDEXER_GRAD, {"pre_tokens": 3}, NotImplementedError,
     "pre_tokens: expected"),
    ("npu_attention_update", LSE, {"update_type": 2}, ValueError, "update_type: expected 0"),
    ("npu_ring_attention_update", RING, {"input_layout": "BSH"}, NotImplementedError,
     "input_layout: expected SBH or TND"),
    ("npu_ring_attention_update", RING, {"cur_attn_out": torch.ones(5, 2, 16)}, ValueError,
     "cur_attn_out: expected"),
    ("npu_ring_attention_update", {**PACKED_RING, "input_layout": "TND"},
     {"actual_seq_qlen": torch.tensor([0, 4])}, ValueError,
     r"actual_seq_qlen: expected cumulative sequence lengths from 0 to T = 5, got \[0, 4\]"),
    ("npu_rotary_mul", ROTARY, {"rotary_mode": "quarter"}, NotImplementedError,
     "rotary_mode: expected"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "call", "changed", "error", "message"), WRONG)
def test_values_that_are_not_computed(
    name: str, call: dict[str, Any], changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^({qualified(name)}|ascend::[a-z_]+): .*{message}"):
        operator(name)(**{**call, **changed})


def test_blocks_that_are_none() -> None:
    cache = bf16(4, 16, 128)
    table = torch.tensor([[1, 2], [3, -1]], dtype=torch.int32)
    call = {**INFERENCE, "key": cache, "value": cache, "block_table": table, "block_size": 16}
    torch_npu.npu_fused_infer_attention_score(**call, actual_seq_lengths_kv=[20, 16])
    for lengths, wrong in (([20, 17], table), ([20, 16], table + 2)):
        with pytest.raises(
            ValueError, match=r"block_table: expected block numbers in 0..3, got (-1|4) at"
        ):
            torch_npu.npu_fused_infer_attention_score(
                **{**call, "block_table": wrong}, actual_seq_lengths_kv=lengths
            )
    with pytest.raises(ValueError, match="block_size: expected key's block_size, 16, or 0, got 32"):
        torch_npu.npu_fused_infer_attention_score(
            **{**call, "block_size": 32}, actual_seq_lengths_kv=[20, 16]
        )
