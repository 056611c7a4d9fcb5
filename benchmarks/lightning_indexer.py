"""The indexer operators against plain torch, at the sizes of DeepSeek Sparse Attention.

    python benchmarks/lightning_indexer.py

Each query token selects K of the keys before it at random. Every implementation computes what the
operator returns; FLOPs are counted for the selected pairs only.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import NamedTuple

import ascend_attn_ops
import torch
from ascend_attn_ops import reference
from harness import Call, Row, causal_selection, extra_memory, measure, recorder, report
from results import Recorder, parser
from torch import Tensor

D, ROPE, INDEX_D, INDEX_HEADS = 512, 64, 128, 32
KL_LOSS = "sparse_lightning_indexer_grad_kl_loss"
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

    def kl_loss(self, operators: ModuleType = torch.ops.ascend) -> tuple[Tensor, ...]:
        """Call the operator of `operators`: torch.ops.ascend, or the package's reference."""
        results: tuple[Tensor, ...] = operators.sparse_lightning_indexer_grad_kl_loss(
            *self[:8], scale_value=SCALE, query_rope=self.query_rope, key_rope=self.key_rope
        )
        return results

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


def kl_loss_gathering(x: Inputs) -> tuple[Tensor, ...]:
    """Gathers the selected keys of all tokens, then multiplies."""
    indices = x.sparse_indices[0, :, 0].long()
    selected, j = indices >= 0, indices.clamp(min=0)
    key = torch.cat([x.key, x.key_rope], -1)[0, :, 0][j]
    key_index = x.key_index[0, :, 0][j]
    query = torch.cat([x.query, x.query_rope], -1)[0]
    scores = (query @ key.mT).float() * SCALE
    logits = (x.query_index[0] @ key_index.mT).float()
    d, loss = difference(x, scores, logits, selected[:, None])
    d_weights = torch.einsum("shk,sk->sh", logits.relu(), d)
    d_logits = d[:, None] * x.weights[0].float()[..., None] * (logits > 0)
    d_logits = d_logits.to(x.query.dtype)
    d_query = d_logits @ key_index
    d_key_rows = d_logits.mT @ x.query_index[0]
    d_key = torch.zeros(x.key_index.shape[1], INDEX_D)
    d_key.index_add_(0, j.flatten(), d_key_rows.flatten(0, 1).float())
    return d_query, d_key.to(x.query.dtype), d_weights.to(x.weights.dtype), loss


def kl_loss_masking(x: Inputs) -> tuple[Tensor, ...]:
    """Computes all pairs and masks out those that are not selected."""
    indices = x.sparse_indices[0, :, 0].long()
    s = len(indices)
    selected = torch.zeros(s, s + 1, dtype=torch.bool)
    # An extra last column takes the padding.
    selected = selected.scatter(1, torch.where(indices < 0, s, indices), True)[:, :s]
    key = torch.cat([x.key, x.key_rope], -1)[0, :, 0]
    key_index = x.key_index[0, :, 0]
    query = torch.cat([x.query, x.query_rope], -1)[0]
    scores = (query @ key.T).float() * SCALE
    logits = (x.query_index[0] @ key_index.T).float()
    d, loss = difference(x, scores, logits, selected[:, None])
    d_weights = torch.einsum("shk,sk->sh", logits.relu(), d)
    d_logits = d[:, None] * x.weights[0].float()[..., None] * (logits > 0)
    d_logits = d_logits.to(x.query.dtype)
    d_query = d_logits @ key_index
    d_key = torch.einsum("shk,shd->kd", d_logits, x.query_index[0])
    return d_query, d_key, d_weights.to(x.weights.dtype), loss


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


def kl_loss_rows(dtype: torch.dtype, rounds: int) -> list[Row]:
    x = make_inputs(1024, 256, 64, dtype)
    others: dict[str, Call] = {}
    if dtype == torch.bfloat16:
        others = {
            "reference": partial(x.kl_loss, reference),
            "torch, gathering": partial(kl_loss_gathering, x),
            "torch, masking": partial(kl_loss_masking, x),
        }
    name = f"{KL_LOSS} S=1024 K=256 N1=64 {str(dtype).removeprefix('torch.')}"
    return measure(name, x.kl_loss, others, x.products(), rounds)


def kl_loss_length_rows(rounds: int) -> list[Row]:
    rows = []
    for s in (2048, 8192):
        x = make_inputs(s, 256, 8, torch.bfloat16)
        name = f"{KL_LOSS} S={s} K=256 N1=8 bfloat16"
        rows += measure(name, x.kl_loss, {}, x.products(), rounds)
    return rows


def indexer_grad_rows(rounds: int) -> list[Row]:
    x = make_inputs(1024, 256, 1, torch.bfloat16)
    products = 2 * x.pairs() * 3 * INDEX_HEADS * INDEX_D
    return measure("lightning_indexer_grad S=1024 K=256", x.indexer_grad, {}, products, rounds)


def indexer_rows(rounds: int) -> list[Row]:
    s, k = 4096, 1024
    random = torch.Generator().manual_seed(0)
    query, key, weights = (
        torch.randn(shape, generator=random).bfloat16()
        for shape in ((1, s, INDEX_HEADS, INDEX_D), (1, s, 1, INDEX_D), (1, s, INDEX_HEADS))
    )
    return measure(
        f"lightning_indexer S={s} K={k}",
        partial(torch.ops.ascend.lightning_indexer, query, key, weights, sparse_count=k),
        {"torch, all scores": partial(top_k_of_all_scores, query, key, weights, k)},
        products=2 * (s * (s + 1) // 2) * INDEX_HEADS * INDEX_D,
        rounds=rounds,
    )


def compressed_rows(rounds: int) -> list[Row]:
    """The indexer of DeepSeek-V4 and the gradients of its loss: keys of four tokens each."""
    s, k, ratio = 4096, 512, 4
    random = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(shape, generator=random).bfloat16()
        for shape in ((1, s, INDEX_HEADS, INDEX_D), (1, s // ratio, 1, INDEX_D))
    )
    weights = torch.randn(1, s, INDEX_HEADS, generator=random) * INDEX_D**-0.5 / INDEX_HEADS
    select = partial(
        torch.ops.ascend.lightning_indexer, query, key, weights, sparse_count=k, cmp_ratio=ratio
    )
    indices, _ = select()
    target = torch.rand(indices.shape, generator=random).masked_fill(indices < 0, 0) / k
    seen = sum(i // ratio for i in range(1, s + 1))
    gradients = partial(
        torch.ops.ascend.sparse_lightning_indexer_kl_loss_grad, query, key, weights, indices,
        target, cmp_ratio=ratio,
    )  # fmt: skip
    selected = int((indices >= 0).sum())
    return measure(
        f"lightning_indexer S={s} K={k} ratio={ratio}", select, {},
        products=2 * seen * INDEX_HEADS * INDEX_D, rounds=rounds,
    ) + measure(
        f"sparse_lightning_indexer_kl_loss_grad S={s} K={k} ratio={ratio}", gradients, {},
        products=2 * selected * 3 * INDEX_HEADS * INDEX_D, rounds=rounds,
    )  # fmt: skip


def first_kl_loss(s: int, k: int, threads: int) -> Call:
    """Prepare the inputs in a fresh process, and return the call to measure."""
    torch.set_num_threads(threads)

    def call(x: Inputs) -> object:
        with ascend_attn_ops.limits(None):
            return x.kl_loss()

    call(make_inputs(128, 128, 64, torch.bfloat16))  # loads libraries and generates code
    return partial(call, make_inputs(s, k, 64, torch.bfloat16))


def report_memory(record: Recorder, s: int, k: int) -> None:
    threads = torch.get_num_threads()
    outputs = 2 * (s * INDEX_HEADS * (INDEX_D + 1) + s * INDEX_D)
    accumulators = 4 * threads * s * INDEX_D
    extra = extra_memory(partial(first_kl_loss, s, k, threads))
    case = f"{KL_LOSS} S={s} K={k} N1=64 bfloat16"
    print(
        f"{case}: extra memory {extra / 2**20:.0f} MB, "
        f"outputs and accumulators {(outputs + accumulators) / 2**20:.0f} MB"
    )
    record.add(case, "ours", bytes=extra, bytes_needed=outputs + accumulators)


def main() -> None:
    arguments = parser(__doc__, rounds=5).parse_args()
    rounds = arguments.rounds
    record = recorder("lightning_indexer", arguments.json)
    with ascend_attn_ops.limits(None):
        report(
            record,
            kl_loss_rows(torch.bfloat16, rounds)
            + kl_loss_rows(torch.float16, rounds)
            + kl_loss_length_rows(rounds)
            + indexer_grad_rows(rounds)
            + indexer_rows(rounds)
            + compressed_rows(rounds),
        )
    for selected in (256, 1024):
        report_memory(record, 1024, selected)


if __name__ == "__main__":
    main()
