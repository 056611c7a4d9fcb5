"""FLOPs as torch.utils.flop_counter reports them."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.gradients import outputs_and_gradients
from ascend_attn_ops._core import flops
from ascend_attn_ops.reference.declaration import Arguments
from ascend_attn_ops.reference.operators.sparse_flash_mla import visible
from ascend_attn_ops.reference.sequences import rows, with_dense_keys
from support import registered
from support.attention import to_layout
from support.samples import OPERATORS, RECIPES, Recipe
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode, flop_registry

pytestmark = pytest.mark.usefixtures("no_limits")


def counted(function: Any, *args: Any, **kwargs: Any) -> dict[str, int]:
    """FLOPs by operator."""
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    flops = counter.get_flop_counts()["Global"]
    return {str(name).removeprefix("ascend."): count for name, count in flops.items()}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16).requires_grad_()


def test_every_operator_has_a_formula() -> None:
    """Or its record says that it computes nothing."""
    expected = registered.OPERATORS - {x.name for x in OPERATORS.values() if x.in_place}
    assert {key.__name__ for key in flop_registry if str(key).startswith("ascend.")} == expected


def test_indexer_by_hand() -> None:
    """Two sequences of 3 queries and 5 keys: the queries see 3, 4 and 5 keys."""
    query, key, weights = normal(2, 3, 4, 16), normal(2, 5, 1, 16), normal(2, 3, 4)

    def step() -> None:
        _, values = ops.lightning_indexer(query, key, weights, sparse_count=4, return_values=True)
        values.masked_fill(values == -torch.inf, 0).sum().backward()

    scores = 2 * (3 + 4 + 5) * 4
    selected = 2 * (3 + 4 + 4) * 4
    assert counted(step) == {
        "lightning_indexer": scores * (2 * 16 + 2),
        # q k^T again, dS k, dS^T q, and r d for the weights
        "lightning_indexer_grad": selected * (3 * 2 * 16 + 2),
    }


def test_sparse_attention_and_its_loss_by_hand() -> None:
    """Sequences of 2 queries over 4 keys, and of 3 over 3, of which at most 2 are selected."""
    query, latent = normal(5, 8, 32), normal(7, 1, 32)
    query_rope, key_rope = normal(5, 8, 16), normal(7, 1, 16)
    query_index, key_index, weights = normal(5, 4, 16), normal(7, 1, 16), normal(5, 4)
    ends, key_ends = torch.tensor([2, 5]).int(), torch.tensor([4, 7]).int()
    indices = torch.zeros(5, 1, 2, dtype=torch.int32)
    options = {"scale_value": 0.1, "query_rope": query_rope, "key_rope": key_rope, "layout": "TND"}

    def step() -> None:
        out, *statistics = ops.sparse_flash_attention(
            query, latent, latent, indices, **options,
            actual_seq_lengths_query=ends, actual_seq_lengths_key=key_ends,
        )  # fmt: skip
        loss = ops.lightning_indexer_kl_loss(
            query, latent, query_index, key_index, weights, indices, *statistics, **options,
            actual_seq_lengths_query=[2, 5], actual_seq_lengths_key=[4, 7],
        )  # fmt: skip
        (out.sum() + loss).backward()

    selected = (2 + 2) + (1 + 2 + 2)
    assert counted(step) == {
        "sparse_flash_attention": selected * 8 * (2 * 48 + 2 * 32),
        # the scores again, dP = dO V^T, dV = P^T dO, dQ = dS K, dK = dS^T Q
        "sparse_flash_attention_grad": selected * 8 * (2 * 48 + 2 * 32 + 2 * 32 + 2 * 48 + 2 * 48),
        # attention; S, w r, r d, dS k, dS^T q
        "sparse_lightning_indexer_grad_kl_loss": selected
        * (8 * 2 * 48 + 4 * (2 * 16 + 2 + 2 + 2 * 16 + 2 * 16)),
    }


PAGES = {"rows": (9, 16, 2 * 32), "heads": (9, 2, 16, 32), "fractals": (9, 2, 2, 16, 16)}


@pytest.mark.parametrize("form", PAGES)
@pytest.mark.parametrize("layout", ["TND", "BSH_NBSD", "NTD_TND"])
def test_paged_attention_by_hand(layout: str, form: str) -> None:
    """Causal, with ropes: 3 queries over 7 keys, and 2 over 20."""
    pages = torch.randn(PAGES[form], dtype=torch.bfloat16)
    query = torch.randn(5, 4, 32, dtype=torch.bfloat16)
    lengths = [3, 5]
    pairs = (5 + 6 + 7) + (19 + 20)
    if layout == "BSH_NBSD":
        query, lengths = query[:4].reshape(2, 2, 4 * 32), []
        pairs -= 5
    elif layout == "NTD_TND":
        query = query.transpose(0, 1)
    flops = counted(
        ops.fused_infer_attention_score, query, pages, pages, num_heads=4, num_key_value_heads=2,
        layout=layout, sparse_mode=3, block_table=torch.zeros(2, 2, dtype=torch.int32),
        query_rope=query, key_rope=pages, actual_seq_lengths_query=lengths,
        actual_seq_lengths_key=[7, 20],
    )  # fmt: skip
    assert flops == {"fused_infer_attention_score": pairs * 4 * 2 * (64 + 32)}


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_dense_attention_is_that_of_torch(layout: str) -> None:
    def step(call: Any) -> None:
        call().sum().backward()

    b, n, s, skv, d = 2, 4, 6, 9, 16
    query, key, value = normal(b, n, s, d), normal(b, n, skv, d), normal(b, n, skv, d)

    ours = counted(
        step,
        lambda: ops.flash_attention_score(
            *(to_layout(x, layout) for x in (query, key, value)), num_heads=n, layout=layout
        )[0],
    )
    forward = 2 * b * n * s * skv * (d + d)
    assert ours == {
        "flash_attention_score": forward, "flash_attention_score_grad": forward * 5 // 2,
    }  # fmt: skip
    # torch counts its fused kernels alike.
    shapes = [x.shape for x in (query, key, value)]
    assert list(ours.values()) == [
        flop_counter.sdpa_flop_count(*shapes),
        flop_counter.sdpa_backward_flop_count(query.shape, *shapes),
    ]


def test_dense_attention_counts_what_a_mode_keeps() -> None:
    x = normal(1, 4, 2, 16).detach()

    def pairs(x: Tensor = x, **options: Any) -> float:
        options = {"num_heads": 2, "layout": "BSND", **options}
        (flops,) = counted(ops.flash_attention_score, x, x, x, **options).values()
        return flops / (2 * 2 * (16 + 16))

    assert pairs() == 16
    assert pairs(sparse_mode=3) == 10
    assert pairs(sparse_mode=4, pre_tokens=1, next_tokens=0) == 7
    packed = {"layout": "TND", "sparse_mode": 3, "actual_seq_lengths_query": [1, 4]}
    assert pairs(x[0], **packed, actual_seq_lengths_key=[1, 4]) == 1 + 6
    # The values of a mask are not read.
    assert pairs(atten_mask=torch.ones(4, 4, dtype=torch.bool).triu(1)) == 16


def test_prompt_attention_reads_actual_lengths() -> None:
    x = normal(2, 4, 2 * 16).detach()
    (flops,) = counted(
        ops.prompt_flash_attention, x, x, x, num_heads=2, layout="BSH",
        actual_seq_lengths_query=[2, 3], actual_seq_lengths_key=[4],
    ).values()  # fmt: skip
    assert flops == (2 * 4 + 3 * 4) * 2 * 2 * (16 + 16)


def test_attention_update_by_hand() -> None:
    parts = [torch.randn(5, 2, 16).requires_grad_() for _ in range(3)]
    lse = [torch.randn(5, 2) for _ in range(3)]

    def step() -> None:
        ops.attention_update(lse, parts)[0].sum().backward()

    assert counted(step) == dict.fromkeys(
        ("attention_update", "_attention_update_grad"), 2 * 3 * 5 * 2 * 16
    )


SPARSE = [r for r in RECIPES if r.operator.name.endswith("sparse_flash_attention")]


@pytest.mark.parametrize("recipe", SPARSE, ids=lambda recipe: recipe.id)
def test_every_layout_mode_and_length(recipe: Recipe) -> None:
    """Against the rows of the reference."""
    sample = recipe.make(torch.bfloat16)
    most = sample.arguments["sparse_indices"].shape[-1] * sample.arguments["sparse_block_size"]
    dense = with_dense_keys(Arguments(**{"block_table": None, **sample.arguments}), "key")
    read = sum(min(row.limit, most) for row in rows(dense))
    heads, size = sample.inputs["query"].shape[-2:]
    rope, within = (sample.arguments.get(x) for x in ("query_rope", "rope_head_dim"))
    joined = size + (rope.shape[-1] if rope is not None else 0)
    expected = read * heads * 2 * (joined + size - (within or 0))
    assert counted(sample.call, torch.ops.ascend) == {recipe.operator.name: expected}


MLA = [r for r in RECIPES if r.operator.name == "sparse_flash_mla"]


@pytest.mark.parametrize("recipe", MLA, ids=lambda recipe: recipe.id)
def test_windows_and_compressed_keys(recipe: Recipe) -> None:
    """Against the rows of the reference, with a selection that names a key in every slot."""
    sample = recipe.make(torch.bfloat16)
    indices = sample.inputs["cmp_sparse_indices"]
    pairs = 0
    for keys in visible(sample.replace(cmp_sparse_indices=None).exact_arguments()):
        compressed = len(keys.compressed)
        most = compressed if indices is None else indices.shape[-1]
        pairs += len(keys.window) + min(compressed, most)
    heads, size = sample.inputs["query"].shape[-2:]
    assert counted(sample.call, torch.ops.ascend) == {"sparse_flash_mla": pairs * heads * 4 * size}


def test_the_gradient_of_windows_and_compressed_keys() -> None:
    """Three queries, with windows of 1, 2 and 2 keys; the last also sees a compressed key."""
    query, keys = normal(1, 3, 2, 8), normal(1, 3, 1, 8)
    compressed = normal(1, 1, 1, 8)

    def step() -> None:
        options = {"scale_value": 0.1, "cmp_ratio": 3, "ori_win_left": 1}
        ops.sparse_flash_mla(query, keys, compressed, **options)[0].sum().backward()

    pairs = 1 + 2 + 3
    # the scores again, dP, d_query, dS^T q and P^T d_out
    assert counted(step) == {
        "sparse_flash_mla": pairs * 2 * 2 * 2 * 8, "sparse_flash_mla_grad": pairs * 2 * 5 * 2 * 8,
    }  # fmt: skip


COMPRESSED = [
    r
    for r in RECIPES
    if r.operator.name.endswith(("lightning_indexer", "sparse_lightning_indexer_kl_loss_grad"))
]


@pytest.mark.parametrize("recipe", COMPRESSED, ids=lambda recipe: recipe.id)
def test_every_ratio_and_residual(recipe: Recipe) -> None:
    """Against the rows of the reference."""
    sample, name = recipe.make(torch.bfloat16), recipe.operator.name
    query, key = list(sample.inputs.values())[:2]
    call = Arguments(**{"block_table": None, **sample.arguments, "query": query, "key": key})
    limits = [row.limit for row in rows(with_dense_keys(call, "key"))]
    heads, size = query.shape[-2:]
    if name.endswith("lightning_indexer"):
        expected = sum(limits) * heads * (2 * size + 2)
    else:
        most = sample.inputs["sparse_indices"].shape[-1]
        # S, dS k and dS^T q; w r and r d.
        expected = sum(min(x, most) for x in limits) * heads * (3 * 2 * size + 2 * 2)
    assert counted(sample.call, torch.ops.ascend).get(name, 0) == expected


@pytest.mark.parametrize(
    "name", [name for name, operator in OPERATORS.items() if not operator.in_place]
)
def test_fake_tensors(name: str) -> None:
    """As counts a model that does not fit anywhere."""
    sample = OPERATORS[name].small_sample()
    with FakeTensorMode() as mode:
        fake = counted(sample.map(mode.from_tensor).call, torch.ops.ascend)
    assert fake == counted(sample.call, torch.ops.ascend)


def test_fake_lengths_count_as_equal() -> None:
    x, key = normal(6, 2, 16).detach(), normal(6, 1, 16).detach()
    ends = torch.tensor([3, 6]).int()
    options = {"layout": "TND", "actual_seq_lengths_query": ends, "actual_seq_lengths_key": ends}
    real = counted(ops.lightning_indexer, x, key, x[..., 0], sparse_count=2, **options)
    with FakeTensorMode() as mode:
        x, key, ends = (mode.from_tensor(y) for y in (x, key, ends))
        options |= {"actual_seq_lengths_query": ends, "actual_seq_lengths_key": ends}
        assert counted(ops.lightning_indexer, x, key, x[..., 0], sparse_count=2, **options) == real


def test_differentiation_is_counted_once() -> None:
    """A forward, and a gradient operator: nothing of a second forward."""
    for name in ("flash_attention_score", "sparse_flash_attention", "lightning_indexer"):
        sample = OPERATORS[name].small_sample()
        assert counted(outputs_and_gradients, sample).keys() == {name, f"{name}_grad"}


def test_the_formulas_can_be_taken_back() -> None:
    packet = torch.ops.ascend.attention_update
    for _ in range(2):
        flops.unregister()
        assert packet not in flop_registry
    for _ in range(2):
        flops.register()
        assert packet in flop_registry
