"""torch_npu's sparse attention and indexer on the CPU against plain torch, with gradients."""

from __future__ import annotations

import pytest
import torch
from ascend_attn_check.samples.record import Recipe
from support.npu_names import torch_npu
from support.samples import OPERATORS, as_tuple
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("no_limits")

B, S1, S2, N, D, DR, K = 2, 3, 6, 4, 8, 4, 3
ABSORBED = {"attention_mode": 2, "return_softmax_lse": True}


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def inputs() -> list[Tensor]:
    """query, latent, query_rope, key_rope."""
    torch.manual_seed(0)
    return [drawn(B, S1, N, D), drawn(B, S2, 1, D), drawn(B, S1, N, DR), drawn(B, S2, 1, DR)]


def selected() -> Tensor:
    """Selects some of the keys that each query sees in sparse_mode 3; -1 fills short rows."""
    rows = [torch.randperm(S2 - S1 + 1 + i)[:K].sort().values for i in range(S1)]
    return torch.stack([torch.stack(rows)] * B)[:, :, None].int()


def stated(tensors: list[Tensor], indices: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out, and the log-sum-exp (B, 1, S1, N)."""
    query, latent, query_rope, key_rope = tensors
    keep = torch.zeros(B, S1, S2, dtype=torch.bool).scatter(2, indices[:, :, 0].long(), True)
    keys = latent[:, :, 0], key_rope[:, :, 0]
    scores = sum(
        torch.einsum("bind,bjd->bnij", x, y) for x, y in zip((query, query_rope), keys, strict=True)
    )
    scores = (scores * scale).masked_fill(~keep[:, None], -torch.inf)
    out = torch.einsum("bnij,bjd->bind", scores.softmax(-1), latent[:, :, 0])
    return out, scores.logsumexp(-1).transpose(1, 2)[:, None]


def test_attention_and_its_gradients() -> None:
    tensors, indices = inputs(), selected()
    query, latent, query_rope, key_rope = tensors
    ropes = {"query_rope": query_rope, "key_rope": key_rope}
    out, maximum, total = torch_npu.npu_sparse_flash_attention(
        query, latent, latent, indices, 0.3, **ropes, **ABSORBED
    )
    expected, lse = stated(tensors, indices, 0.3)
    assert_close(out, expected)
    assert_close(maximum + total.log(), lse)
    gradients = torch.autograd.grad(out.square().sum(), tensors)
    assert_close(gradients, torch.autograd.grad(expected.square().sum(), tensors))
    by_operator = torch_npu.npu_sparse_flash_attention_grad(
        query.detach(), latent.detach(), latent.detach(), indices, 2 * out.detach(), out.detach(),
        maximum, total, 0.3, 1, query_rope.detach(), key_rope.detach(), attention_mode=2,
    )  # fmt: skip
    d_query, d_key, d_value, d_query_rope, d_key_rope = by_operator
    assert_close((d_query, d_key + d_value, d_query_rope, d_key_rope), gradients)


# The name of an operator for int8 in vLLM-Ascend, and of its layout of the keys.
OF_VLLM = {
    "quant_lightning_indexer": ("npu_lightning_indexer_quant", "layout_key"),
    "kv_quant_sparse_flash_attention": ("npu_kv_quant_sparse_flash_attention", "layout_kv"),
}
OTHERS = [*OPERATORS["lightning_indexer"].recipes, *OPERATORS["sparse_flash_attention"].recipes]
PAGED = [x for x in OTHERS if x.case.page and x.case.ratio == 1]
OF_INT8 = [x for name in OF_VLLM for x in OPERATORS[name].recipes]


@pytest.mark.parametrize("recipe", [*PAGED, *OF_INT8], ids=lambda x: x.id)
def test_pages_and_int8(recipe: Recipe) -> None:
    """As by this library's names."""
    sample = recipe.make(torch.bfloat16)
    defaults = {x.name: x.default_value for x in recipe.operator.overload._schema.arguments}
    given = {**defaults, **sample.arguments, "return_softmax_lse": False}
    out, *others = as_tuple(recipe.operator.torch_npu(given))  # type: ignore[misc]
    assert_same_bits([out], sample.call(torch.ops.ascend)[:1])
    if recipe.operator.name in OF_VLLM:
        name, layout_of_keys = OF_VLLM[recipe.operator.name]
        given = {**sample.arguments, "layout_query": sample.options["layout"]}
        given.setdefault(layout_of_keys, given.pop("layout"))
        if layout_of_keys == "layout_kv":
            given["actual_seq_lengths_kv"] = given.pop("actual_seq_lengths_key", None)
            given |= {"key_quant_mode": 2, "value_quant_mode": 2}
        of_vllm, *others = as_tuple(getattr(torch.ops._C_ascend, name)(**given))
        assert of_vllm.equal(out)
    assert all(x.shape == (0,) for x in others)  # not asked for


def test_indexer_and_its_gradients() -> None:
    torch.manual_seed(0)
    # No product is negative, which relu would make equal to others.
    query, key = torch.rand(B, S1, 2, D).double(), torch.rand(B, S2, 1, D).double()
    tensors = [query.requires_grad_(), key.requires_grad_(), drawn(B, S1, 2)]
    weights = tensors[2]
    indices, values = torch_npu.npu_lightning_indexer(
        *tensors, sparse_count=K, sparse_mode=0, return_value=True
    )
    products = torch.einsum("bihd,bjd->bhij", query, key[:, :, 0]).relu()
    scores = (products * weights.transpose(1, 2)[..., None]).sum(1)
    expected, order = scores.topk(K)
    assert torch.equal(indices[:, :, 0], order.int())
    assert_close(values[:, :, 0], expected)
    gradients = torch.autograd.grad(values.square().sum(), tensors)
    assert_close(gradients, torch.autograd.grad(expected.square().sum(), tensors))
    by_operator = torch_npu.npu_lightning_indexer_grad(
        query.detach(), key.detach(), 2 * values.detach(), indices, weights.detach(), sparse_mode=0
    )
    assert_close(by_operator, gradients)
    assert torch_npu.npu_lightning_indexer(*tensors, sparse_count=K)[1].shape == (0,)


def test_loss_of_the_indexer() -> None:
    query, latent, query_rope, key_rope = (x.detach() for x in inputs())
    index = [drawn(B, S1, 2, D), drawn(B, S2, 1, D), drawn(B, S1, 2)]
    indices, ropes = selected(), {"query_rope": query_rope, "key_rope": key_rope}
    _, maximum, total = torch_npu.npu_sparse_flash_attention(
        query, latent, latent, indices, 0.3, **ropes, **ABSORBED
    )
    *gradients, loss = torch_npu.npu_sparse_lightning_indexer_grad_kl_loss(
        query, latent, *(x.detach() for x in index), indices, maximum, total, 0.3, **ropes
    )
    at = indices[:, :, 0].long()
    main = sum(
        torch.einsum("bind,bjd->bnij", x, y[:, :, 0])
        for x, y in ((query, latent), (query_rope, key_rope))
    )
    chosen = (main * 0.3).gather(-1, at[:, None].expand(-1, N, -1, -1))
    target = chosen.softmax(-1).mean(1)
    products = torch.einsum("bihd,bjd->bhij", index[0], index[1][:, :, 0]).relu()
    scores = (products * index[2].transpose(1, 2)[..., None]).sum(1).gather(-1, at)
    expected = (target * (target.log() - scores.log_softmax(-1))).sum()
    assert_close(loss, expected[None])
    assert_close(gradients, list(torch.autograd.grad(expected, index)))
