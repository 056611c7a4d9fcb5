"""The calls that MindSpeed-LLM and vLLM-Ascend make for DeepSeek-V4 and V3.2, on the CPU.

Expected values are our operators' of each sequence alone, which other tests hold to the statement.
"""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from support.npu_names import cann_ops
from torch import Tensor
from torch.testing import assert_close

N, D, TOPK, RATIO = 64, 512, 512, 4
OF_VLLM = torch.ops._C_ascend
TOKENS = [9, 14]
WINDOW = {"ori_mask_mode": 4, "cmp_mask_mode": 3, "ori_win_left": 127, "ori_win_right": 0}


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


class Text:
    """A sequence: queries, keys of the attention and of its indexer, and what is expected."""

    def __init__(self, tokens: int) -> None:
        compressed = tokens // RATIO
        self.residual = tokens % RATIO
        self.q, self.ori_kv, self.cmp_kv = (
            bf16(1, n, h, D) for n, h in ((tokens, N), (tokens, 1), (compressed, 1))
        )
        self.index = bf16(1, tokens, 8, 128), bf16(1, compressed, 1, 128), torch.rand(1, tokens, 8)
        self.indices, self.values = ops.lightning_indexer(
            *self.index, sparse_count=TOPK, cmp_ratio=RATIO, return_values=True,
            cmp_residual_key=torch.tensor([self.residual]),
        )  # fmt: skip
        self.options: dict[str, Any] = {
            "scale_value": D**-0.5, "sink": SINK, "cmp_ratio": RATIO,
            "cmp_residual_kv": torch.tensor([self.residual]),
        }  # fmt: skip
        self.out, self.lse = ops.sparse_flash_mla(
            self.q, self.ori_kv, self.cmp_kv, self.indices, **self.options
        )
        self.gradients = ops.sparse_flash_mla_grad(
            self.q, self.ori_kv, self.cmp_kv, self.indices, self.q, self.out, self.lse,
            **self.options,
        )  # fmt: skip


torch.manual_seed(0)
SINK = torch.randn(N)
TEXTS = [Text(tokens) for tokens in TOKENS]
ENDS, CMP_ENDS = (
    torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    for lengths in (TOKENS, [n // RATIO for n in TOKENS])
)
RESIDUALS = torch.tensor([text.residual for text in TEXTS], dtype=torch.int32)


def packed(name: str) -> Tensor:
    return torch.cat([getattr(text, name)[0] for text in TEXTS])


def test_indexer_of_mindspeed() -> None:
    """ops/npu_lightning_indexer.py: BSND, and a pack."""
    for text in TEXTS:
        q, k, w = text.index
        metadata = cann_ops.lightning_indexer_metadata(
            8, 1, 128, TOPK, cmp_residual_k=torch.tensor([text.residual]), batch_size=1,
            max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1], layout_q="BSND", layout_k="BSND",
            mask_mode=3, cmp_ratio=RATIO,
        )  # fmt: skip
        found = cann_ops.lightning_indexer(
            q, k, w, TOPK, cmp_residual_k=torch.tensor([text.residual]), metadata=metadata,
            layout_q="BSND", layout_k="BSND", mask_mode=3, cmp_ratio=RATIO, return_value=1,
        )  # fmt: skip
        assert_close(found, (text.indices, text.values), rtol=0, atol=0)
    q, k, w = (torch.cat([text.index[i][0] for text in TEXTS]) for i in range(3))
    indices, values = cann_ops.lightning_indexer(
        q, k, w, TOPK, cu_seqlens_q=ENDS, cu_seqlens_k=CMP_ENDS, cmp_residual_k=RESIDUALS,
        metadata=metadata, layout_q="TND", layout_k="TND", mask_mode=3, cmp_ratio=RATIO,
        return_value=1,
    )  # fmt: skip
    assert torch.equal(indices, packed("indices"))
    assert torch.equal(values, packed("values"))


LENGTHS = {
    "cu_seqlens_q": ENDS, "cu_seqlens_ori_kv": ENDS, "cu_seqlens_cmp_kv": CMP_ENDS,
    "cmp_residual_kv": RESIDUALS, "layout_q": "TND", "layout_kv": "TND",
}  # fmt: skip
BATCH = {
    "cmp_residual_kv": torch.tensor([TEXTS[1].residual]), "layout_q": "BSND", "layout_kv": "BSND"
}  # fmt: skip


def call_of(pack: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    names = ("q", "ori_kv", "cmp_kv")
    tensors = {name: packed(name) if pack else getattr(TEXTS[1], name) for name in names}
    tensors["cmp_sparse_indices"] = packed("indices") if pack else TEXTS[1].indices
    options = {"sinks": SINK, "softmax_scale": D**-0.5, "cmp_ratio": RATIO, **WINDOW}
    return tensors, {**options, **(LENGTHS if pack else BATCH)}


@pytest.mark.parametrize("pack", [False, True])
def test_attention_of_mindspeed(pack: bool) -> None:
    """ops/npu_sparse_flash_mla.py and its gradient, with the probabilities that its loss needs."""
    tensors, options = call_of(pack)
    texts = TEXTS if pack else TEXTS[1:]
    metadata = cann_ops.sparse_flash_mla_metadata(N, 1, D, cmp_topk=TOPK)
    out, lse = cann_ops.sparse_flash_mla(
        **tensors, **options, metadata=metadata, return_softmax_lse=True
    )
    assert_close(out.view(-1, N, D), torch.cat([x.out[0] for x in texts]), rtol=0, atol=0)
    assert_close(lse.view(-1, N), torch.cat([x.lse[0, 0] for x in texts]), rtol=0, atol=0)
    q = tensors.pop("q")
    *gradients, of_original, of_compressed = cann_ops.sparse_flash_mla_grad(
        q, q, out, lse, **tensors, **options,
        metadata=cann_ops.sparse_flash_mla_grad_metadata(num_heads_q=N, num_heads_kv=1, head_dim=D),
    )  # fmt: skip
    assert of_original.numel() == 0
    *expected, d_sink, probabilities = zip(*(x.gradients for x in texts), strict=True)
    for x, y in zip([*gradients[:3], of_compressed], [*expected, probabilities], strict=True):
        assert_close(x.flatten(0, -2), torch.cat([z.flatten(0, -2) for z in y]))
    assert_close(gradients[3], torch.stack(d_sink).sum(0))


def test_loss_of_mindspeed() -> None:
    """ops/npu_sparse_flash_mla_with_indexer_loss.py."""
    for text in TEXTS:
        target = text.gradients[-1]
        residual = torch.tensor([text.residual])
        expected = ops.sparse_lightning_indexer_kl_loss_grad(
            *text.index, text.indices, target, cmp_ratio=RATIO, cmp_residual_key=residual
        )
        found = cann_ops.sparse_lightning_indexer_kl_loss_grad(
            *text.index, text.indices, target, cmp_residual_k=residual, mask_mode=3,
            metadata=cann_ops.sparse_lightning_indexer_kl_loss_grad_metadata(8, 1, 128),
            layout_q="BSND", layout_k="BSND", cmp_ratio=RATIO,
        )  # fmt: skip
        assert_close(found, expected, rtol=0, atol=0)


def pages_of(name: str, size: int) -> tuple[Tensor, Tensor]:
    """The keys of all texts in blocks of any order, and the table."""
    rows = [getattr(text, name)[0] for text in TEXTS]
    table = torch.randperm(2 * len(rows)).int().view(len(rows), 2)
    cache = torch.full((table.numel(), size, *rows[0].shape[1:]), torch.nan).bfloat16()
    for blocks, keys in zip(table.tolist(), rows, strict=True):
        for block, part in zip(blocks, keys.split(size), strict=False):
            cache[block, : len(part)] = part
    return cache, table


@pytest.mark.parametrize("steps", [1, 3])
def test_decoding_of_vllm(steps: int) -> None:
    """attention/dsa_v1.py: the last queries of each sequence over pages of all its keys."""
    ori_kv, ori_table = pages_of("ori_kv", 128)
    cmp_kv, cmp_table = pages_of("cmp_kv", 128)
    ends = torch.arange(0, steps * len(TEXTS) + 1, steps, dtype=torch.int32)
    lengths = torch.tensor(TOKENS, dtype=torch.int32)
    last = {x: torch.cat([getattr(t, x)[0, -steps:] for t in TEXTS]) for x in ("q", "indices")}
    metadata = OF_VLLM.npu_sparse_attn_sharedkv_metadata(
        num_heads_q=N, num_heads_kv=1, head_dim=D, cu_seqlens_q=ends, seqused_kv=lengths,
        batch_size=len(TEXTS), max_seqlen_q=steps, cmp_topk=TOPK, layout_q="TND",
        layout_kv="PA_ND", device=str(lengths.device),
    )  # fmt: skip
    call = {
        "ori_kv": ori_kv, "ori_block_table": ori_table, "cu_seqlens_q": ends, "sinks": SINK,
        "seqused_kv": lengths, "softmax_scale": D**-0.5, "layout_q": "TND", "layout_kv": "PA_ND",
        "metadata": metadata, "cu_seqlens_ori_kv": ends, **WINDOW,
    }  # fmt: skip
    out, _ = OF_VLLM.npu_sparse_attn_sharedkv(
        last["q"], **call, cmp_kv=cmp_kv, cmp_sparse_indices=last["indices"], cmp_ratio=RATIO,
        cmp_block_table=cmp_table, cu_seqlens_cmp_kv=CMP_ENDS,
    )  # fmt: skip
    assert_close(out, torch.cat([text.out[0, -steps:] for text in TEXTS]))
    out, _ = OF_VLLM.npu_sparse_attn_sharedkv(last["q"], **call, cmp_ratio=1)
    alone = [
        ops.sparse_flash_mla(x.q, x.ori_kv, scale_value=D**-0.5, sink=SINK)[0][0] for x in TEXTS
    ]
    assert_close(out, torch.cat([x[-steps:] for x in alone]))
    of_cann, _ = cann_ops.sparse_flash_mla(
        last["q"], ori_kv=ori_kv, ori_block_table=ori_table, cu_seqlens_q=ends, sinks=SINK,
        seqused_ori_kv=lengths, softmax_scale=D**-0.5, layout_q="TND", layout_kv="PA_BBND",
    )  # fmt: skip
    assert torch.equal(of_cann, out)


def test_sparse_decoding_of_vllm() -> None:
    """device/device_op.py for DeepSeek-V3.2: select and attend over pages, with statistics that
    ranks merge."""
    q, rope, q_index = bf16(2, N, D), bf16(2, N, 64), bf16(2, 64, 128)
    kv, key_rope, k_index = bf16(4, 128, 1, D), bf16(4, 128, 1, 64), bf16(4, 128, 1, 128)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    lengths = {"actual_seq_lengths_query": torch.tensor([1, 2], dtype=torch.int32)}
    counts = torch.tensor([130, 77], dtype=torch.int32)
    options = {"block_table": table, "layout_query": "TND"}
    indices, _ = OF_VLLM.npu_lightning_indexer(
        query=q_index, key=k_index, weights=bf16(2, 64), **lengths, actual_seq_lengths_key=counts,
        layout_key="PA_BSND", sparse_count=2048, sparse_mode=3, **options,
    )  # fmt: skip
    assert (indices >= 0).sum(-1).flatten().tolist() == counts.tolist()
    out, maximum, total = OF_VLLM.npu_sparse_flash_attention(
        query=q, key=kv, value=kv, sparse_indices=indices, scale_value=0.05, sparse_block_size=1,
        **lengths, actual_seq_lengths_kv=counts, query_rope=rope, key_rope=key_rope,
        layout_kv="PA_BSND", sparse_mode=3, attention_mode=2, return_softmax_lse=True, **options,
    )  # fmt: skip
    for i, count in enumerate(counts.tolist()):
        keys, ropes = (x[table[i].long()].flatten(0, 2)[:count] for x in (kv, key_rope))
        wide = torch.cat((q[i], rope[i]), -1).double()
        scores = 0.05 * wide @ torch.cat((keys, ropes), -1).double().T
        assert_close(out[i].double(), scores.softmax(-1) @ keys.double(), rtol=2**-7, atol=6e-3)
        lse = maximum[0, i] + total[0, i].log()
        assert_close(lse.double(), scores.logsumexp(-1), rtol=0, atol=1e-3)


def test_paged_attention_and_outputs_that_are_given() -> None:
    """attention/attention_v1.py in a graph: ATB's operator, and FIA into given tensors."""
    torch_npu_ops, atb = torch.ops.npu, torch.ops.atb
    q, pages = bf16(2, 8, 128), bf16(6, 128, 2, 128)
    values = pages.flip(0)
    table, lengths = torch.tensor([[5, 0], [2, 1]], dtype=torch.int32), [200, 31]
    call = {
        "actual_seq_lengths": [1, 2], "actual_seq_lengths_kv": lengths, "block_table": table,
        "num_heads": 8, "num_key_value_heads": 2, "scale": 0.1, "input_layout": "TND",
        "block_size": 128, "softmax_lse_flag": True,
    }  # fmt: skip
    rows = q, pages.flatten(2), values.flatten(2)
    out, lse = torch_npu_ops.npu_fused_infer_attention_score(*rows, **call)
    workspace = torch_npu_ops._npu_fused_infer_attention_score_get_max_workspace(*rows, **call)
    given = [torch.empty_like(x) for x in (out, lse)]
    torch_npu_ops.npu_fused_infer_attention_score.out(*rows, **call, workspace=workspace, out=given)
    assert_close(given, [out, lse], rtol=0, atol=0)
    call["softmax_lse_flag"] = False
    given = [torch.empty_like(out), torch.empty(1)]
    torch_npu_ops.npu_fused_infer_attention_score.out(*rows, **call, out=given)
    assert torch.equal(given[0], out)
    context_lens, result = torch.tensor(lengths, dtype=torch.int32), torch.empty_like(q)
    arguments = q, pages, values, 2, 8, 0.1, table, context_lens, result
    workspace = atb._npu_paged_attention_get_workspace(*arguments)
    assert atb._npu_paged_attention(*arguments, workspace=workspace) is None
    assert_close(result, out)
