"""The references agree with independent statements of the same mathematics."""

from __future__ import annotations

import torch
from ascend_attn_ops import reference
from torch import Tensor

B, S1, S2, H, D, DR, K = 2, 7, 9, 3, 8, 4, 9
SCALE = 0.3


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def causal_mask() -> Tensor:
    """The lower right corner of (S1, S2) is on the diagonal."""
    return torch.ones(S1, S2, dtype=torch.bool).tril(S2 - S1)


def all_causal_keys() -> Tensor:
    indices = torch.arange(S2).expand(S1, S2).masked_fill(~causal_mask(), -1)
    return indices.int().expand(B, 1, S1, S2).transpose(1, 2)


def test_attention_to_every_causal_key_is_dense_attention() -> None:
    torch.manual_seed(0)
    query, key, value = randn(B, S1, H, D), randn(B, S2, 1, D), randn(B, S2, 1, D)
    query_rope, key_rope = randn(B, S1, H, DR), randn(B, S2, 1, DR)
    tensors = [query, key, value, query_rope, key_rope]
    for x in tensors:
        x.requires_grad_()

    dense = torch.nn.functional.scaled_dot_product_attention(
        torch.cat((query, query_rope), -1).transpose(1, 2),
        torch.cat((key, key_rope), -1).transpose(1, 2).expand(-1, H, -1, -1),
        value.transpose(1, 2).expand(-1, H, -1, -1), attn_mask=causal_mask(), scale=SCALE,
    ).transpose(1, 2)  # fmt: skip
    options = {"scale_value": SCALE, "query_rope": query_rope, "key_rope": key_rope}
    indices = all_causal_keys()
    out, softmax_max, softmax_sum = reference.sparse_flash_attention(
        query, key, value, indices, **options
    )
    torch.testing.assert_close(out, dense)

    d_out = randn(*out.shape)
    expected = torch.autograd.grad(dense, tensors, d_out)
    torch.testing.assert_close(torch.autograd.grad(out, tensors, d_out), expected)
    stated = reference.sparse_flash_attention_grad(
        query, key, value, indices, d_out, out, softmax_max, softmax_sum, **options
    )
    torch.testing.assert_close(stated, expected)


def test_a_block_is_its_keys() -> None:
    torch.manual_seed(0)
    query, key, value = randn(B, S1, H, D), randn(B, S2, 1, D), randn(B, S2, 1, D)
    blocks = torch.tensor([2, 0, -1, 1]).int().expand(B, S1, 1, 4)
    keys = torch.tensor([8, 0, 1, 2, 3, -1, 5]).int().expand(B, S1, 1, 7)
    options = {"scale_value": SCALE, "sparse_mode": 0}
    by_block = reference.sparse_flash_attention(
        query, key, value, blocks, sparse_block_size=4, **options
    )
    by_key = reference.sparse_flash_attention(query, key, value, keys, **options)
    torch.testing.assert_close(by_block, by_key)


def test_packed_sequences_are_separate_batches() -> None:
    torch.manual_seed(0)
    query, key, value = randn(S1, H, D), randn(S2, 1, D), randn(S2, 1, D)
    indices = torch.tensor([0, 1, -1]).int().expand(S1, 1, 3)
    ends_q, ends_k = torch.tensor([3, 3, 6]).int(), torch.tensor([4, 4, 8]).int()
    options = {"scale_value": SCALE, "sparse_mode": 3}
    out, softmax_max, _ = reference.sparse_flash_attention(
        query, key, value, indices, layout="TND", actual_seq_lengths_query=ends_q,
        actual_seq_lengths_key=ends_k, **options,
    )  # fmt: skip
    for q, k in ((slice(0, 3), slice(0, 4)), (slice(3, 6), slice(4, 8))):
        alone = reference.sparse_flash_attention(
            query[None, q], key[None, k], value[None, k], indices[None, q], **options
        )
        torch.testing.assert_close(out[q], alone[0][0])
        torch.testing.assert_close(softmax_max[0, q], alone[1][0, 0])
    assert not out[6:].any()


def test_scores_of_the_indexer_and_their_gradient() -> None:
    torch.manual_seed(0)
    query, key, weights = randn(B, S1, H, D), randn(B, S2, 1, D), randn(B, S1, H)
    tensors = [query, key, weights]
    for x in tensors:
        x.requires_grad_()
    scores = torch.einsum(
        "bqh,bqhk->bqk", weights, torch.einsum("bqhd,bkxd->bqhk", query, key).relu()
    )
    expected = scores.masked_fill(~causal_mask(), -torch.inf).topk(4, -1)
    indices, values = reference.lightning_indexer(
        query, key, weights, sparse_count=4, return_values=True
    )
    torch.testing.assert_close(values[:, :, 0], expected.values)
    keep = values.isfinite()
    # Where every head's product is negative the score is zero: tied keys, so scores are compared.
    named = scores.gather(-1, indices[:, :, 0].clamp(min=0).long())
    torch.testing.assert_close(named[keep[:, :, 0]], values[keep])
    assert (indices[~keep] == -1).all()

    d_values = randn(*values.shape) * keep
    gradients = torch.autograd.grad(values, tensors, d_values)
    torch.testing.assert_close(
        reference.lightning_indexer_grad(query, key, d_values, indices, weights), gradients
    )


def test_kl_loss_is_the_divergence_and_has_its_gradients() -> None:
    torch.manual_seed(0)
    query, key = randn(B, S1, H, D), randn(B, S2, 1, D)
    query_index, key_index, weights = randn(B, S1, 2, 5), randn(B, S2, 1, 5), randn(B, S1, 2)
    tensors = [query_index, key_index, weights]
    for x in tensors:
        x.requires_grad_()
    hidden = ~causal_mask()
    scores = SCALE * torch.einsum("bqhd,bkxd->bhqk", query, key)
    target = scores.masked_fill(hidden, -torch.inf).softmax(-1).mean(1)
    index_scores = torch.einsum(
        "bqh,bqhk->bqk", weights, torch.einsum("bqhd,bkxd->bqhk", query_index, key_index).relu()
    )
    log_y = index_scores.masked_fill(hidden, -torch.inf).log_softmax(-1)
    divergence = torch.nn.functional.kl_div(log_y[:, ~hidden], target[:, ~hidden], reduction="sum")

    indices = all_causal_keys()
    _, softmax_max, softmax_sum = reference.sparse_flash_attention(
        query, key, key, indices, scale_value=SCALE
    )
    *gradients, loss = reference.sparse_lightning_indexer_grad_kl_loss(
        query, key, query_index, key_index, weights, indices, softmax_max, softmax_sum,
        scale_value=SCALE,
    )  # fmt: skip
    torch.testing.assert_close(loss, divergence[None])
    torch.testing.assert_close(tuple(gradients), torch.autograd.grad(divergence, tensors))


def test_windows_of_heads_of_one_element_with_any_stride() -> None:
    rows = torch.arange(1.0, 6.0)[:, None, None]
    apart = torch.stack((rows, rows), -1)[..., 0]
    caches = [torch.zeros(1, 8, 1, 1), torch.zeros(1, 8, 1, 1)]
    whole = {"slots": [0], "compress_lens": [2], "compress_seq_offset": [1], "seq_lens": [5]}
    slots, *lists = (torch.tensor(x, dtype=torch.int32) for x in whole.values())
    options = dict(zip(list(whole)[1:], lists, strict=True))
    reference.scatter_pa_kv_cache_(
        apart, caches[0], slots, apart, caches[1], scatter_mode="Rope", **options
    )
    for cache in caches:
        assert cache.flatten().tolist() == [1, 2.5, 4, 5, 0, 0, 0, 0]
