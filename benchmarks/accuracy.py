"""How far results in half precision are from the exact ones, ours and those of plain torch.

    python benchmarks/accuracy.py

Exact are the formulas in float64, on the same rounded inputs. Errors are relative to A, the same
formulas with absolute values: docs/numerics.md. The largest one is what is beyond
half a unit in the last place of the output, which the tolerance has as well; the mean is of all.
"eager" is what a model computes without a fused operator: products in the dtype of the inputs, the
softmax in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ascend_attn_ops
import torch
from harness import causal_selection, name_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

TOKENS, HEADS, D, SELECTED = 1024, 16, 128, 256
SCALE = D**-0.5
DTYPES = (torch.bfloat16, torch.float16)

Results = Sequence[Tensor]


@dataclass(frozen=True)
class Exact:
    name: str
    value: Tensor
    terms: Tensor  # A


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, *shape).to(dtype)


def with_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], d_out: Tensor
) -> Results:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


def probabilities(query: Tensor, key: Tensor, kept: Tensor) -> Tensor:
    """In float32 from the products in the inputs' dtype; in float64 for those of float64."""
    scores = (query @ key.mT * SCALE).masked_fill(~kept, -torch.inf)
    return scores.softmax(-1, torch.promote_types(scores.dtype, torch.float32))


def exact_attention(inputs: Sequence[Tensor], kept: Tensor, d_out: Tensor) -> list[Exact]:
    """The output and the gradients of (1, N, S, D); of one head of keys, their sums over heads."""
    q, k, v, d_o = (x.double() for x in (*inputs, d_out))
    p = probabilities(q, k, kept)
    out, of_out = p @ v, p @ v.abs()
    d_s = p * (d_o @ v.mT - (d_o * out).sum(-1, keepdim=True))
    of_d_s = p * (d_o.abs() @ v.abs().mT + (d_o * out).abs().sum(-1, keepdim=True))

    def of_keys(x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True) if k.shape[1] == 1 else x

    return [
        Exact("out", out, of_out),
        Exact("d_query", SCALE * d_s @ k, SCALE * of_d_s @ k.abs()),
        Exact("d_key", SCALE * of_keys(d_s.mT @ q), SCALE * of_keys(of_d_s.mT @ q.abs())),
        Exact("d_value", of_keys(p.mT @ d_o), of_keys(p.mT @ d_o.abs())),
    ]


def indexer_scores(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """(1, S, S) from (1, N, S, D), (1, 1, S, D) and (1, N, S)."""
    return (weights[..., None] * (query @ key.mT).relu()).sum(1)


def exact_indexer(
    names: Sequence[str], inputs: Sequence[Tensor], d: Tensor, of_d: Tensor
) -> list[Exact]:
    """The gradients for that of the scores, d, of which the terms are `of_d`."""
    q, k, w = (x.double() for x in inputs)
    s, r = q @ k.mT, q.abs() @ k.abs().mT
    d_s, of_d_s = (x * y * (s > 0) for x, y in ((d, w[..., None]), (of_d, w.abs()[..., None])))
    return [
        Exact(names[0], d_s @ k, of_d_s @ k.abs()),
        Exact(
            names[1],
            (d_s.mT @ q).sum(1, keepdim=True),
            (of_d_s.mT @ q.abs()).sum(1, keepdim=True),
        ),
        Exact(names[2], (s.relu() * d).sum(-1), (r * of_d).sum(-1)),
    ]


def turned(x: Tensor) -> Tensor:
    """(1, N, S, D) as (1, S, N, D), (1, N, S) as (1, S, N), or back."""
    return x.transpose(1, 2)


def dense(dtype: torch.dtype) -> None:
    inputs = [random(HEADS, TOKENS, D, dtype=dtype) for _ in range(3)]
    d_out = random(HEADS, TOKENS, D, dtype=dtype)
    kept = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"layout": "BNSD", "scale_value": SCALE, "sparse_mode": 2}
        return ascend_attn_ops.flash_attention_score(q, k, v, num_heads=HEADS, **options)[0]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return probabilities(q, k, kept).to(dtype) @ v

    results = {
        name: with_gradients(function, inputs, d_out)
        for name, function in (("ours", ours), ("SDPA", sdpa), ("eager", eager))
    }
    report("flash_attention_score", dtype, exact_attention(inputs, kept, d_out), results)


def sparse(dtype: torch.dtype) -> None:
    """The three sparse operators, and the loss, on one selection."""
    query = random(HEADS, TOKENS, D, dtype=dtype)
    key, value = (random(1, TOKENS, D, dtype=dtype) for _ in range(2))
    d_out = random(HEADS, TOKENS, D, dtype=dtype)
    indices = causal_selection(TOKENS, SELECTED)
    columns = torch.where(indices < 0, TOKENS, indices).long()[:, :, 0]

    def of_keys(x: Tensor, empty: float) -> Tensor:
        """(1, S, K) of selected keys as (1, S, S) of all."""
        return x.new_full((1, TOKENS, TOKENS + 1), empty).scatter(-1, columns, x)[..., :-1]

    kept = of_keys(torch.ones(columns.shape), 0).bool()

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        arguments = turned(q), turned(k), turned(v), indices
        return turned(ascend_attn_ops.sparse_flash_attention(*arguments, scale_value=SCALE)[0])

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return probabilities(q, k, kept).to(dtype) @ v

    attention = query, key, value
    results = {
        name: with_gradients(function, attention, d_out)
        for name, function in (("ours", ours), ("eager", eager))
    }
    exact = exact_attention(attention, kept, d_out)
    report("sparse_flash_attention", dtype, exact, results)

    index = (
        random(HEADS, TOKENS, D, dtype=dtype),
        random(1, TOKENS, D, dtype=dtype),
        random(HEADS, TOKENS, dtype=dtype) * (HEADS * D) ** -0.5,
    )
    d_values = random(TOKENS, 1, SELECTED, dtype=dtype).masked_fill(indices < 0, 0)
    of_index = [turned(x) for x in index]
    of_operator = torch.ops.ascend.lightning_indexer_grad(
        of_index[0], of_index[1], d_values, indices, of_index[2]
    )
    d = of_keys(d_values[:, :, 0], 0)
    by_autograd = with_gradients(indexer_scores, index, d)[1:]
    names = ("d_query", "d_key", "d_weights")
    exact = exact_indexer(names, index, d.double(), d.double().abs())
    both = {"ours": [turned(x) for x in of_operator], "eager": by_autograd}
    report("lightning_indexer", dtype, exact, both)

    target = probabilities(query.double(), key.double(), kept).mean(1)
    y = indexer_scores(*(x.double() for x in index)).masked_fill(~kept, -torch.inf).softmax(-1)
    names = ("d_query_index", "d_key_index", "d_weights")
    exact = exact_indexer(names, index, y - target, y + target)
    _, softmax_max, softmax_sum = ascend_attn_ops.sparse_flash_attention(
        turned(query), turned(key), turned(value), indices, scale_value=SCALE
    )
    of_operator = torch.ops.ascend.sparse_lightning_indexer_grad_kl_loss(
        turned(query), turned(key), *of_index, indices, softmax_max, softmax_sum, scale_value=SCALE
    )

    def eager_loss(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        scores = indexer_scores(q, k, w).masked_fill(~kept, -torch.inf)
        logarithms = scores.log_softmax(-1, torch.float32).masked_fill(~kept, 0)
        return -(probabilities(query, key, kept).mean(1) * logarithms).sum()

    by_autograd = with_gradients(eager_loss, index, torch.ones(()))[1:]
    both = {"ours": [turned(x) for x in of_operator[:3]], "eager": by_autograd}
    report("sparse_lightning_indexer_grad_kl_loss", dtype, exact, both)


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns half a unit in the last place of the dtype, at |x|."""
    limits = torch.finfo(dtype)
    exponent = x.abs().clamp(min=limits.smallest_normal).frexp().exponent - 1
    return torch.ldexp(torch.full_like(x, limits.eps / 2), exponent)


def report(
    operator: str, dtype: torch.dtype, exact: Sequence[Exact], results: dict[str, Results]
) -> None:
    print(f"{operator}, {name_of(dtype)}: |error| / A, max and mean")
    for number, one in enumerate(exact):
        row = f"    {one.name:14}"
        for name, outputs in results.items():
            error = (outputs[number].double() - one.value).abs()
            beyond = (error - half_ulp(one.value, outputs[number].dtype)).clamp(min=0)
            # Where nothing is summed, 0 is exact.
            summed = (error > 0) | (one.terms > 0)
            largest, mean = (x[summed] / one.terms[summed] for x in (beyond, error))
            row += f"{name:>8} {float(largest.max()):.1e} {float(mean.mean()):.1e}"
        print(row)


def main() -> None:
    sizes = f"{TOKENS} tokens, {HEADS} heads of {D}"
    print(f"torch {torch.__version__}; {sizes}, causal; sparse: {SELECTED} keys per token")
    with ascend_attn_ops.limits(None):
        for dtype in DTYPES:
            torch.manual_seed(0)
            dense(dtype)
            sparse(dtype)


if __name__ == "__main__":
    main()
