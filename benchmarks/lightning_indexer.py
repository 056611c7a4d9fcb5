"""The indexer operators against plain torch, at the sizes of DeepSeek Sparse Attention.

    python benchmarks/lightning_indexer.py

Each query token selects K of the keys before it at random. Every implementation computes what the
operator returns; FLOPs are counted for the selected pairs only.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from harness import Benchmark, causal_selection, kept, name_of
from torch import Tensor

D, ROPE, INDEX_D, INDEX_HEADS = 512, 64, 128, 32
SCALE = 192**-0.5  # DeepSeek-V3.2, with heads of 128 + 64 before absorption


class Inputs(NamedTuple):
    """Inputs of sparse_lightning_indexer_grad_kl_loss, in layout BSND with one batch."""

    query: Tensor
    key: Tensor
    query_index: Tensor
    key_index: Tensor
    weights: Tensor
    sparse_indices: Tensor
    softmax_max: Tensor
    softmax_sum: Tensor
    query_rope: Tensor
    key_rope: Tensor

    def kl_loss(self) -> tuple[Tensor, ...]:
        return torch.ops.ascend.sparse_lightning_indexer_grad_kl_loss(
            *self[:8], scale_value=SCALE, query_rope=self.query_rope, key_rope=self.key_rope
        )

    def indexer_grad(self) -> tuple[Tensor, ...]:
        d_values = torch.ones(self.sparse_indices.shape, dtype=self.query_index.dtype)
        return torch.ops.ascend.lightning_indexer_grad(
            self.query_index, self.key_index, d_values, self.sparse_indices, self.weights
        )

    def pairs(self) -> int:
        return int((self.sparse_indices >= 0).sum())

    def products(self) -> int:
        """Return the floating-point operations of the matrix products of the KL loss."""
        heads = self.query.shape[2]
        return 2 * self.pairs() * (heads * (D + ROPE) + 3 * INDEX_HEADS * INDEX_D)


def make_inputs(s: int, k: int, heads: int, dtype: torch.dtype) -> Inputs:
    torch.manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    return Inputs(
        query=normal(1, s, heads, D),
        key=normal(1, s, 1, D),
        query_index=normal(1, s, INDEX_HEADS, INDEX_D),
        key_index=normal(1, s, 1, INDEX_D),
        weights=normal(1, s, INDEX_HEADS) * INDEX_D**-0.5 / INDEX_HEADS,
        sparse_indices=causal_selection(s, k),
        # Roughly the statistics of these scores; their values do not change the work.
        softmax_max=torch.full((1, 1, s, heads), 3.0),
        softmax_sum=torch.full((1, 1, s, heads), float(k)),
        query_rope=normal(1, s, heads, ROPE),
        key_rope=normal(1, s, 1, ROPE),
    )


def kl_loss_in_torch(x: Inputs, gathering: bool) -> tuple[Tensor, ...]:
    """Gathers the selected keys of every token, or computes all pairs and masks out the others."""
    indices = x.sparse_indices[0, :, 0].long()
    key, key_index = torch.cat([x.key, x.key_rope], -1)[0, :, 0], x.key_index[0, :, 0]
    if gathering:
        selected, j = indices >= 0, indices.clamp(min=0)
        key, key_index = key[j], key_index[j]
    else:
        selected = kept(indices, len(key))
    query = torch.cat([x.query, x.query_rope], -1)[0]
    scores = (query @ key.mT).float() * SCALE
    logits = (x.query_index[0] @ key_index.mT).float()
    d, loss = difference(x, scores, logits, selected[:, None])
    d_weights = torch.einsum("shk,sk->sh", logits.relu(), d)
    d_logits = d[:, None] * x.weights[0].float()[..., None] * (logits > 0)
    d_logits = d_logits.to(x.query.dtype)
    d_query = d_logits @ key_index
    if gathering:
        d_rows = (d_logits.mT @ x.query_index[0]).flatten(0, 1).float()
        d_key = torch.zeros(x.key_index.shape[1], INDEX_D).index_add_(0, j.flatten(), d_rows)
    else:
        d_key = torch.einsum("shk,shd->kd", d_logits, x.query_index[0])
    return d_query, d_key.to(x.query.dtype), d_weights.to(x.weights.dtype), loss


def difference(
    x: Inputs, scores: Tensor, logits: Tensor, selected: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y - p, zero where nothing is selected, and the loss."""
    maximum, total = (y[0, 0, :, :, None] for y in (x.softmax_max, x.softmax_sum))
    p = ((scores - maximum).exp() / total).mean(1)
    index_scores = (logits.relu() * x.weights[0].float()[..., None]).sum(1)
    y = index_scores.masked_fill(~selected[:, 0], -torch.inf).softmax(-1)
    p_clamped, y_clamped = p.clamp(min=1e-8), y.clamp(min=1e-8)
    terms = p_clamped * (p_clamped.log() - y_clamped.log())
    zero = torch.zeros(())
    return torch.where(selected[:, 0], y - p, zero), torch.where(selected[:, 0], terms, zero).sum()


def top_k_of_all_scores(query: Tensor, key: Tensor, weights: Tensor, k: int) -> Tensor:
    """Does the same as lightning_indexer, with the scores of all heads in memory."""
    s = query.shape[1]
    logits = (query[0].flatten(0, 1) @ key[0, :, 0].T).view(s, INDEX_HEADS, s)
    scores = (logits.relu_().mT @ weights[0, :, :, None])[..., 0]
    scores.masked_fill_(torch.ones(s, s, dtype=torch.bool).triu_(1), -torch.inf)
    return scores.topk(k).indices


def measure_kl_loss(run: Benchmark) -> None:
    name = "sparse_lightning_indexer_grad_kl_loss"
    for dtype in (torch.bfloat16, torch.float16):
        x = make_inputs(1024, 256, 64, dtype)
        peers = {"torch, gathering": True, "torch, masking": False}
        run.measure(
            f"{name} S=1024 K=256 N1=64 {name_of(dtype)}", x.kl_loss,
            {peer: partial(kl_loss_in_torch, x, gathering) for peer, gathering in peers.items()}
            if dtype == torch.bfloat16 else {},
            x.products(),
        )  # fmt: skip
    for s in (2048, 8192):
        x = make_inputs(s, 256, 8, torch.bfloat16)
        run.measure(f"{name} S={s} K=256 N1=8 bfloat16", x.kl_loss, {}, x.products())


def measure_indexer(run: Benchmark) -> None:
    x = make_inputs(1024, 256, 1, torch.bfloat16)
    products = 2 * INDEX_HEADS * INDEX_D  # of a pair
    run.measure("lightning_indexer_grad S=1024 K=256", x.indexer_grad, {}, 3 * products * x.pairs())
    s, k = 4096, 1024
    query, key, weights = random_index(s, s)
    run.measure(
        f"lightning_indexer S={s} K={k}",
        partial(torch.ops.ascend.lightning_indexer, query, key, weights, sparse_count=k),
        {"torch, all scores": partial(top_k_of_all_scores, query, key, weights, k)},
        products * (s * (s + 1) // 2),
    )
    # DeepSeek-V4's indexer and the gradients of its loss: keys of four tokens each.
    k, ratio = 512, 4
    query, key, weights = random_index(s, s // ratio)
    weights = weights.float() * INDEX_D**-0.5 / INDEX_HEADS
    options = {"cmp_ratio": ratio}
    select = partial(
        torch.ops.ascend.lightning_indexer, query, key, weights, sparse_count=k, **options
    )
    indices, _ = select()
    target = torch.rand(indices.shape).masked_fill(indices < 0, 0) / k
    gradients = partial(
        torch.ops.ascend.sparse_lightning_indexer_kl_loss_grad, query, key, weights, indices,
        target, **options,
    )  # fmt: skip
    sizes = f"S={s} K={k} ratio={ratio}"
    seen = sum(i // ratio for i in range(1, s + 1))
    run.measure(f"lightning_indexer {sizes}", select, {}, products * seen)
    selected = int((indices >= 0).sum())
    case = f"sparse_lightning_indexer_kl_loss_grad {sizes}"
    run.measure(case, gradients, {}, 3 * products * selected)


def random_index(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key = torch.randn(1, queries, INDEX_HEADS, INDEX_D), torch.randn(1, keys, 1, INDEX_D)
    return query.bfloat16(), key.bfloat16(), torch.randn(1, queries, INDEX_HEADS).bfloat16()


def main() -> None:
    run = Benchmark(__file__, __doc__, rounds=5)
    measure_kl_loss(run)
    measure_indexer(run)


if __name__ == "__main__":
    main()
