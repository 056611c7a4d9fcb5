"""An infinite element of one token changes no result that does not depend on it."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops.reference.call import as_tuple
from support.samples import OPERATORS, Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

Outputs = tuple[Tensor, ...]

DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def assert_as_reference(operator: str, actual: Outputs, *arguments: Tensor, **options: Any) -> None:
    """A NaN where the reference has one, and nowhere else."""
    schema = OPERATORS[operator].overload._schema.arguments
    names = [x.name for x in schema if not x.kwarg_only]
    sample = Sample(operator, "", dict(zip(names, arguments, strict=True)), options)
    OPERATORS[operator].bounds.check(sample, actual)


def tokens(heads: int, keys: int, dtype: torch.dtype, infinite: slice) -> tuple[Tensor, ...]:
    """A query whose product with the infinite keys is -inf, keys and values."""
    query = torch.zeros(1, 2, heads, 4, dtype=dtype)
    query[..., 0] = 1
    key, value = torch.randn(2, 1, keys, 1, 4, dtype=dtype)
    key[:, infinite, :, 0] = -torch.inf
    return query, key, value


def every_key(keys: int) -> Tensor:
    return torch.arange(keys, dtype=torch.int32).expand(1, 2, 1, keys).contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("infinite", [1, 127, 128, 129, 256])
def test_tiles_whose_scores_are_minus_infinity(infinite: int, dtype: torch.dtype) -> None:
    keys = infinite + 8
    query, key, value = tokens(2, keys, dtype, slice(infinite))
    options = {"scale_value": 1.0, "sparse_mode": 0}
    arguments = query, key, value, every_key(keys)
    actual = torch.ops.ascend.sparse_flash_attention(*arguments, **options)
    assert_as_reference("sparse_flash_attention", actual, *arguments, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 2, 3, 5])
def test_gradients_beside_an_infinite_key(heads: int, dtype: torch.dtype) -> None:
    """Heads are padded to whole tiles; those of padding have no part."""
    query, key, value = tokens(heads, 6, dtype, slice(1, 2))
    options = {"scale_value": 1.0, "sparse_mode": 0}
    main = query, key, value, every_key(6)
    out, *statistics = torch.ops.ascend.sparse_flash_attention(*main, **options)
    arguments = *main, torch.randn_like(out), out, *statistics
    actual = torch.ops.ascend.sparse_flash_attention_grad(*arguments, **options)
    assert_as_reference("sparse_flash_attention_grad", actual, *arguments, **options)
    assert actual[1].isfinite().all()
    assert actual[2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 16])
def test_loss_beside_an_infinite_key(heads: int, dtype: torch.dtype) -> None:
    query, key, _ = tokens(heads, 6, dtype, slice(1, 2))
    query_index, key_index, _ = tokens(heads, 6, dtype, slice(2, 3))
    weights = torch.rand(1, 2, heads, dtype=dtype)
    options = {"scale_value": 1.0, "sparse_mode": 0}
    indices = every_key(6)
    _, *statistics = torch.ops.ascend.sparse_flash_attention(query, key, key, indices, **options)
    arguments = query, key, query_index, key_index, weights, indices, *statistics
    options = {"scale_value": 1.0, "layout": "BSND", "sparse_mode": 3}
    actual = torch.ops.ascend.sparse_lightning_indexer_grad_kl_loss(*arguments, **options)
    assert_as_reference("sparse_lightning_indexer_grad_kl_loss", actual, *arguments, **options)
    assert actual[3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 2, 17])
def test_dense_gradients_of_an_infinite_key_that_no_query_sees(
    queries: int, dtype: torch.dtype
) -> None:
    """Queries are padded to whole tiles; the padding must not change a result."""
    query, key, value = (torch.randn(1, 1, n, 4, dtype=dtype) for n in (queries, 32, 32))
    key[0, 0, queries + 2, 0] = torch.inf
    options = {"num_heads": 1, "layout": "BNSD", "scale_value": 0.5, "sparse_mode": 2}
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, *_ = ascend_attn_ops.flash_attention_score(*leaves, **options)
    _, d_key, d_value = torch.autograd.grad(out.sum(), leaves)
    assert out.isfinite().all()
    for gradient in (d_key, d_value):
        assert gradient[:, :, :queries].isfinite().all()
        assert (gradient[:, :, queries:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_gradients_of_keys_that_a_mask_hides_from_a_nan(dtype: torch.dtype) -> None:
    """The maximum and the sum of such a row are NaN."""
    query, key, value = (torch.randn(1, 1, n, 4, dtype=dtype) for n in (3, 20, 20))
    query[0, 0, 1, 0] = torch.nan
    mask = torch.rand(3, 20) < 0.3
    mask[1, ::2] = True
    options = {"num_heads": 1, "layout": "BNSD", "scale_value": 0.5, "sparse_mode": 1}
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, *_ = ascend_attn_ops.flash_attention_score(*leaves, atten_mask=mask, **options)
    _, d_key, d_value = torch.autograd.grad(out.sum(), leaves)
    assert d_value[0, 0, mask[1]].isfinite().all()
    assert d_value[0, 0, ~mask[1]].isnan().all()
    assert d_key.isnan().any()


# An infinity or NaN in each operator; docs/numerics.md has the rules.

ALL_DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
VALUES = {"-inf": -torch.inf, "+inf": torch.inf, "NaN": torch.nan}
T = torch.ops.ascend
DENSE = ["flash_attention_score", "prompt_flash_attention"]
SFA, LI, UPDATE = "sparse_flash_attention", "lightning_indexer", "attention_update"
GRADIENTS = ["flash_attention_score_grad", "sparse_flash_attention_grad"]
KL = ["sparse_lightning_indexer_grad_kl_loss"]
OUT_NAN, NANS = "out NaN", "dQ NaN, dK NaN, dV NaN"
FINITE_DV = "dQ NaN, dK NaN, dV finite"
KL_NAN = "loss NaN, dQ NaN, dK NaN, dW NaN"
WITHOUT, DROPPED = "out as without it, lse_out as without it", "out 0, lse_out -inf"
UNKNOWN, NO_GRADIENT = "out NaN, lse_out NaN", "d_lse 0, d_local_out 0"
BEHIND_LSE, UNDEFINED = "d_lse NaN, d_local_out finite", "d_lse NaN, d_local_out NaN"
BECOMES = [
    # operators, where, and what -inf, +inf and NaN make of the results
    ([*DENSE, SFA], "a score", "out as without it", OUT_NAN, OUT_NAN),
    (DENSE, "every score", "out 0", OUT_NAN, OUT_NAN),
    ([SFA], "every score", OUT_NAN, OUT_NAN, OUT_NAN),
    ([*DENSE, SFA], "a value", "out -inf", "out inf", OUT_NAN),
    ([*DENSE, SFA], "a value of weight 0", OUT_NAN, OUT_NAN, OUT_NAN),
    (GRADIENTS, "a score", "dQ NaN, dK 0, dV 0", NANS, NANS),
    (GRADIENTS[:1], "every score", "dQ 0, dK NaN, dV 0", NANS, NANS),
    (GRADIENTS[1:], "every score", NANS, NANS, NANS),
    (GRADIENTS, "a value", FINITE_DV, FINITE_DV, FINITE_DV),
    (GRADIENTS, "dO", "dQ NaN, dK NaN, dV -inf", "dQ NaN, dK NaN, dV inf", NANS),
    ([LI], "a product", "score 0, rank 2", "score inf, rank 0", "score NaN, rank 0"),
    ([LI], "a weight", "score -inf", "score inf", "score NaN"),
    ([LI + "_grad"], "a product", "dQ NaN, dK 0, dW finite", "dQ inf, dK finite, dW inf",
     "dQ NaN, dK 0, dW NaN"),
    ([LI + "_grad"], "a weight", "dQ -inf, dK -inf, dW finite", "dQ inf, dK inf, dW finite",
     "dQ NaN, dK NaN, dW finite"),
    ([LI + "_grad"], "d_values", "dQ -inf, dK -inf, dW -inf", "dQ inf, dK inf, dW inf",
     "dQ NaN, dK NaN, dW NaN"),
    (KL, "a score of attention", "loss finite, dQ finite, dK finite, dW finite", KL_NAN, KL_NAN),
    (KL, "a product of the indexer", "loss finite, dQ NaN, dK 0, dW finite", KL_NAN,
     "loss NaN, dQ NaN, dK 0, dW NaN"),
    ([UPDATE], "an lse", WITHOUT, WITHOUT, UNKNOWN),
    ([UPDATE], "every lse", DROPPED, DROPPED, UNKNOWN),
    ([UPDATE], "local_out", "out -inf, lse_out finite", "out inf, lse_out finite",
     "out NaN, lse_out finite"),
    ([UPDATE], "local_out of weight 0", *3 * ["out NaN, lse_out finite"]),
    ([UPDATE + "_grad"], "an lse", NO_GRADIENT, NO_GRADIENT, UNDEFINED),
    ([UPDATE + "_grad"], "every lse", NO_GRADIENT, NO_GRADIENT, UNDEFINED),
    ([UPDATE + "_grad"], "local_out", BEHIND_LSE, BEHIND_LSE, BEHIND_LSE),
]  # fmt: skip
TABLE = [
    (operator, where, *x)
    for operators, where, *cells in BECOMES
    for operator in operators
    for x in zip(VALUES, cells, strict=True)
]

# Results that depend on the value, by the table's names; without a value they are left out.
Results = dict[str, Tensor]


def attention(operator: str, where: str, value: float | None, dtype: torch.dtype) -> Results:
    """One query and three keys, of which the last has the value. All numbers are positive: a score
    has the sign of the infinity."""
    query = torch.tensor([[0.5, 0.25]], dtype=dtype)
    d_out = torch.tensor([[1, 0.5]], dtype=dtype)
    last = -4000 if "weight 0" in where else 0.5
    key = torch.tensor([[0.25, 0.5], [0.5, 0.125], [last, 0.5]], dtype=dtype)
    values = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=dtype)
    if value is None:
        key, values = key[:2], values[:2]
    else:
        places = {"every score": query, "a score": key, "dO": d_out}
        places.get(where, values)[-1, 0] = value
    name = operator.removesuffix("_grad")
    options: dict[str, Any] = {"scale_value": 1.0}
    if name == "sparse_flash_attention":
        inputs = [x.view(1, -1, 1, 2) for x in (query, key, values)]
        inputs.append(torch.arange(len(key), dtype=torch.int32).view(1, 1, 1, -1))
        options["sparse_mode"] = 0
    else:
        inputs = [x.view(1, 1, -1, 2) for x in (query, key, values)]
        options |= {"num_heads": 1, "layout": "BNSD"}
    out, *statistics = as_tuple(getattr(T, name)(*inputs, **options))
    if name == operator:
        # The channel of a value is the first.
        return {"out": out if "score" in where else out[..., 0]}
    saved = [d_out.view(out.shape), *statistics, out]
    if name == "sparse_flash_attention":
        saved.insert(1, saved.pop())
    dq, dk, dv, *_ = getattr(T, operator)(*inputs, *saved, **options)
    return {"dQ": dq.flatten()[:1], "dK": dk.view(-1, 2)[-1, :1], "dV": dv.view(-1, 2)[-1, :1]}


def indexer(operator: str, where: str, value: float | None, dtype: torch.dtype) -> Results:
    """One query of one head and three keys, of which the last has the value; gradients of 1."""
    query = torch.tensor([0.5, 0.25], dtype=dtype).view(1, 1, 1, 2)
    key = torch.tensor([[0.25, 0.5], [0.5, 0.125], [0.5, 0.5]], dtype=dtype).view(1, 3, 1, 2)
    weights, d_values = torch.ones(1, 1, 1, dtype=dtype), torch.ones(1, 1, 1, 3, dtype=dtype)
    places = {"a product": key[0, 2, 0], "a weight": weights[0, 0], "d_values": d_values[0, 0, 0]}
    places[where][0 if where != "d_values" else 2] = torch.nan if value is None else value
    if operator == "lightning_indexer":
        indices, values = T.lightning_indexer(
            query, key, weights, sparse_count=3, sparse_mode=0, return_values=True
        )
        return {"score": values[indices == 2], "rank": (indices.flatten() == 2).nonzero()[:, 0]}
    every = torch.arange(3, dtype=torch.int32).view(1, 1, 1, 3)
    dq, dk, dw = T.lightning_indexer_grad(query, key, d_values, every, weights, sparse_mode=0)
    return {"dQ": dq.flatten()[:1], "dK": dk.view(-1, 2)[-1, :1], "dW": dw.flatten()}


def loss(operator: str, where: str, value: float | None, dtype: torch.dtype) -> Results:
    """One query of one head, for attention and for the indexer, and three keys, of which the last
    has the value."""
    query = torch.tensor([0.5, 0.25], dtype=dtype).view(1, 1, 1, 2)
    rows = torch.tensor([[0.25, 0.5], [0.5, 0.125], [0.5, 0.5]], dtype=dtype).view(1, 3, 1, 2)
    key, key_index = rows.clone(), rows.clone()
    (key if where == "a score of attention" else key_index)[0, 2, 0, 0] = value
    every = torch.arange(3, dtype=torch.int32).view(1, 1, 1, 3)
    _, *statistics = T.sparse_flash_attention(query, key, key, every, scale_value=1.0)
    dq, dk, dw, total = getattr(T, operator)(
        query, key, query, key_index, torch.ones(1, 1, 1, dtype=dtype), every, *statistics,
        scale_value=1.0, layout="BSND", sparse_mode=3,
    )  # fmt: skip
    return {"loss": total, "dQ": dq.flatten()[:1], "dK": dk.view(-1, 2)[-1, :1], "dW": dw.flatten()}


def update(operator: str, where: str, value: float | None, dtype: torch.dtype) -> Results:
    """Three parts of one row, of which the last has the value."""
    of_lse = torch.float64 if dtype == torch.float64 else torch.float32
    lse = [torch.tensor([x], dtype=of_lse) for x in (1, 0.5, 2)]
    parts = [torch.tensor([[x, 2 * x]], dtype=dtype) for x in (1, 2, 3)]
    if value is None:
        lse, parts = lse[:2], parts[:2]
    elif where == "every lse":
        lse = [torch.full_like(x, value) for x in lse]
    elif where == "an lse":
        lse[2][0] = value
    else:
        parts[2][0, 0] = value
        lse[2][0] = -torch.inf if "weight 0" in where else 2
    for x in (*lse, *parts):
        x.requires_grad_()
    out, lse_out = T.attention_update(lse, parts)
    if operator == "attention_update":
        return {"out": out.detach()[..., 0], "lse_out": lse_out.detach()}
    gradients = torch.autograd.grad(out.sum() + lse_out.sum(), [lse[-1], parts[-1]])
    return {"d_lse": gradients[0], "d_local_out": gradients[1]}


CALLS = {
    "flash_attention_score": attention, "flash_attention_score_grad": attention,
    "prompt_flash_attention": attention, "sparse_flash_attention": attention,
    "sparse_flash_attention_grad": attention, "lightning_indexer": indexer,
    "lightning_indexer_grad": indexer, "sparse_lightning_indexer_grad_kl_loss": loss,
    "attention_update": update, "attention_update_grad": update,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize(("operator", "where", "value", "becomes"), TABLE)
def test_what_becomes_of(
    operator: str, where: str, value: str, becomes: str, dtype: torch.dtype
) -> None:
    call = CALLS[operator]
    results = call(operator, where, VALUES[value], dtype)
    for cell in becomes.split(", "):
        name, _, state = cell.partition(" ")
        x = results[name]
        if state == "as without it":
            expected = call(operator, where, None, dtype)[name]
        elif state == "finite":
            assert bool(x.isfinite().all()), f"{name}: {x}"
            continue
        else:
            expected = torch.full_like(x, float(state))
        rtol = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(x, expected, rtol=rtol, atol=0, equal_nan=True)


def test_every_operator_of_floating_point_is_in_the_table() -> None:
    assert {operator for operator, *_ in TABLE} == set(CALLS)
