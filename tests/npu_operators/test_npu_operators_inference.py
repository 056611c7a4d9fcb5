"""The operators for inference on the CPU against plain torch: layouts, lengths, masks, pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ascend_attn_check.samples.torch_npu_calls import torch_npu as call_of_torch_npu
from support.attention import attention, causal
from support.npu_names import SQUARE, torch_npu
from support.samples import OPERATORS, Recipe
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, NK, SQ, SKV, D = 3, 4, 2, 5, 19, 16
HEADS = {"num_heads": N, "num_key_value_heads": NK}
Q_LENGTHS, K_LENGTHS = [5, 2, 0], [19, 4, 16]


def inputs(queries: int = SQ, value_size: int = D) -> list[Tensor]:
    """query, key and value as (B, N, S, D)."""
    torch.manual_seed(0)
    sizes = ((N, queries, D), (NK, SKV, D), (NK, SKV, value_size))
    return [torch.randn(B, *size, dtype=torch.float64) for size in sizes]


IN: dict[str, Any] = {
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "BSND": lambda x: x.transpose(1, 2),
    "BNSD": lambda x: x,
}
OUT: dict[str, Any] = {**IN, "NBSD": lambda x: x.transpose(0, 1)}


def valid(lengths: Sequence[int], tokens: int) -> Tensor:
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]


Keep = Callable[[int, int], Tensor]


def by_sequence(
    tensors: list[Tensor],
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    keep: Keep | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Each sequence alone, and 0 and +inf behind its queries."""
    query, key, value = tensors
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    lse = torch.full(query.shape[:3], torch.inf, dtype=torch.float64)
    for b, (lq, lk) in enumerate(zip(q_lengths, k_lengths, strict=True)):
        kept = keep(lq, lk) if keep else None
        one = (query[b : b + 1, :, :lq], key[b : b + 1, :, :lk], value[b : b + 1, :, :lk])
        if lq:
            out[b, :, :lq], lse[b, :, :lq] = (x[0] for x in attention(*one, kept, **options))
    return out, lse


FIRST, SECOND = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
RECIPES = OPERATORS["fused_infer_attention_score"].recipes
BY_NAME = [(SECOND, x) for x in RECIPES if x.case.sink != "float32"]
BY_NAME += [(FIRST, x) for x in RECIPES if not x.case.sink and x.case.quant != "query"]


@pytest.mark.parametrize(("name", "recipe"), BY_NAME, ids=lambda x: getattr(x, "id", x))
def test_the_samples(name: str, recipe: Recipe) -> None:
    """Layouts, full masks, packs, ropes, pages and int8, by both names."""
    sample = recipe.make(torch.bfloat16)
    mode = sample.options.get("key_antiquant_mode", 0)
    modes = {"key_quant_mode": mode, "value_quant_mode": mode} if name == SECOND else {}
    out, lse = call_of_torch_npu(name, sample.arguments, **modes)
    expected, expected_lse = sample.call(torch.ops.ascend)
    finite = expected_lse.masked_fill(expected_lse == -torch.inf, torch.inf)
    assert_same_bits((out, lse), (expected, finite))


def all_pairs(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool)


FULL = torch.rand(SQ, SKV, generator=torch.Generator().manual_seed(0)) < 0.4
FULL[2] = True  # a row without keys
MASKS: dict[str, tuple[dict[str, Any], Keep]] = {
    "none": ({"sparse_mode": 0}, all_pairs),
    "a full one": ({"sparse_mode": 1, "atten_mask": FULL}, lambda q, k: ~FULL[:q, :k]),
    "from the left": (
        {"sparse_mode": 2, "atten_mask": SQUARE}, lambda q, k: all_pairs(q, k).tril()
    ),
    "from the right": ({"sparse_mode": 3, "atten_mask": SQUARE}, causal),
    "a band": (
        {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 1, "atten_mask": SQUARE[None, None]},
        lambda q, k: all_pairs(q, k).tril(k - q + 1).triu(k - q - 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_fused_lengths_and_masks(mask: str, with_sink: bool) -> None:
    """The first version, which has no sinks, says the same."""
    tensors, (options, keep) = inputs(), MASKS[mask]
    sink = torch.randn(N).bfloat16() if with_sink else None
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        *tensors, num_query_heads=N, num_key_value_heads=NK, input_layout="BNSD",
        actual_seq_qlen=Q_LENGTHS, actual_seq_kvlen=K_LENGTHS, softmax_scale=0.3,
        learnable_sink=sink, return_softmax_lse=True, **options,
    )  # fmt: skip
    if sink is None:
        first = torch_npu.npu_fused_infer_attention_score(
            *tensors, input_layout="BNSD", actual_seq_lengths=Q_LENGTHS, scale=0.3,
            actual_seq_lengths_kv=K_LENGTHS, softmax_lse_flag=True, **options, **HEADS,
        )  # fmt: skip
        assert_close(first, (out, lse), rtol=0, atol=0)
    else:
        behind = ~valid(Q_LENGTHS, SQ)[:, None].expand(B, N, SQ)
        out[behind], lse[behind] = 0, torch.inf
    expected, expected_lse = by_sequence(tensors, Q_LENGTHS, K_LENGTHS, keep, scale=0.3, sink=sink)
    assert_close(out, expected)
    assert_close(lse, expected_lse[..., None])


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_fused_bias(layout: str) -> None:
    """Added to the scaled scores, beside a mask and lengths."""
    tensors, bias = inputs(), torch.randn(1, N, SQ, SKV, dtype=torch.float64)
    mask = (torch.rand(SQ, SKV) < 0.3).to(torch.int8)
    out, lse = torch_npu.npu_fused_infer_attention_score(
        *map(IN[layout], tensors), **HEADS, input_layout=layout, scale=0.3, pse_shift=bias,
        atten_mask=mask, actual_seq_lengths_kv=K_LENGTHS, softmax_lse_flag=True,
    )  # fmt: skip
    expected, expected_lse = zip(*(
        attention(
            *(x[b : b + 1, :, :n] for x, n in zip(tensors, (SQ, keys, keys), strict=True)),
            mask[:, :keys] == 0, scale=0.3, bias=bias[..., :keys],
        )
        for b, keys in enumerate(K_LENGTHS)
    ), strict=True)  # fmt: skip
    assert_close(out, IN[layout](torch.cat(expected)))
    assert_close(lse[..., 0], torch.cat(expected_lse))


@pytest.mark.parametrize("layout", ["TND", "NTD", "TND_NTD", "NTD_TND"])
def test_fused_packed_sequences(layout: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(*x, D).double() for x in ((8, N), (11, NK), (11, NK)))
    q_ends, k_ends = [3, 3, 8], [4, 6, 11]
    source, _, target = layout.partition("_")

    def turned(x: Tensor, layout: str) -> Tensor:
        return x if layout == "TND" else x.transpose(0, 1)

    out, lse = torch_npu.npu_fused_infer_attention_score(
        *(turned(x, source) for x in (query, key, value)), input_layout=layout,
        actual_seq_lengths=q_ends, actual_seq_lengths_kv=k_ends, sparse_mode=3, atten_mask=SQUARE,
        softmax_lse_flag=True, **HEADS,
    )  # fmt: skip
    expected, expected_lse = torch.zeros_like(query), torch.full((8, N), torch.inf).double()
    for q0, q1, k0, k1 in ((0, 3, 0, 4), (3, 8, 6, 11)):
        one = [x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1])]
        part, part_lse = attention(*one, causal(q1 - q0, k1 - k0))
        expected[q0:q1], expected_lse[q0:q1] = part[0].transpose(0, 1), part_lse[0].T
    assert_close(turned(out, target or source), expected)
    assert_close(lse, expected_lse[..., None])


BLOCK = 16
TABLE = torch.tensor([[5, 2], [1, -1], [0, -1]], dtype=torch.int32)


def paged(x: Tensor, form: str) -> Tensor:
    """(B, N, S, D) spread over the blocks of TABLE."""
    cache = torch.full((6, BLOCK, *x.shape[1::2]), torch.nan, dtype=x.dtype)
    for b, length in enumerate(K_LENGTHS):
        for j in range(length):
            cache[TABLE[b, j // BLOCK], j % BLOCK] = x[b, :, j]
    if form == "heads together":
        return cache.flatten(2)
    if form == "head by head":
        return cache.transpose(1, 2)
    return cache.unflatten(3, (-1, 16)).permute(0, 2, 3, 1, 4).contiguous()


each_cache = pytest.mark.parametrize("form", ["heads together", "head by head", "fractal"])


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"actual_seq_lengths": [3, 7]}, "actual_seq_lengths_query"),
        ({"actual_seq_lengths_kv": [4, 10]}, "actual_seq_lengths_key"),
        ({"block_table": torch.zeros(2, 3).int(), "actual_seq_lengths_kv": [4, 6]}, "key"),
    ],
    ids=["queries behind", "keys behind", "blocks of 8"],
)
def test_calls_that_no_device_computes(changed: dict[str, Any], argument: str) -> None:
    query, key = torch.randn(8, N, D), torch.randn(11, NK, D)
    if "block_table" in changed:
        key = torch.randn(6, 8, NK * D)
    call = {"actual_seq_lengths": [3, 8], "actual_seq_lengths_kv": [4, 11], **changed}
    with pytest.raises(ValueError, match=f"^ascend::fused_infer_attention_score: {argument}: "):
        torch_npu.npu_fused_infer_attention_score(
            query, key, key, input_layout="TND", **call, **HEADS
        )


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_incremental(layout: str) -> None:
    tensors = inputs(queries=1)
    given = [IN[layout](x) for x in tensors]
    options = {"input_layout": layout, "scale_value": 0.3, **HEADS}
    out = torch_npu.npu_incre_flash_attention(*given, actual_seq_lengths=K_LENGTHS, **options)
    expected = by_sequence(tensors, [1] * B, K_LENGTHS, scale=0.3)[0]
    assert_close(out, OUT[layout](expected))
    for axes in ((), (1,), (1, 1)):
        mask = ~valid(K_LENGTHS, SKV).view(B, *axes, SKV)
        out = torch_npu.npu_incre_flash_attention(*given, atten_mask=mask, **options)
        assert_close(out, OUT[layout](expected))


@each_cache
def test_incremental_pages(form: str) -> None:
    tensors = inputs(queries=1)
    cache = [paged(x, form).nan_to_num(1e3) for x in tensors[1:]]
    out = torch_npu.npu_incre_flash_attention(
        IN["BSH"](tensors[0]), *cache, actual_seq_lengths=K_LENGTHS, block_table=TABLE,
        block_size=BLOCK, **HEADS,
    )  # fmt: skip
    assert_close(out, IN["BSH"](by_sequence(tensors, [1] * B, K_LENGTHS)[0]))


@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD", "BNSD_BSND"])
def test_prompt(layout: str) -> None:
    tensors = inputs()
    source, _, target = layout.partition("_")
    out = torch_npu.npu_prompt_flash_attention(
        *(IN[source](x) for x in tensors), input_layout=layout, actual_seq_lengths=Q_LENGTHS,
        actual_seq_lengths_kv=K_LENGTHS, sparse_mode=3, atten_mask=SQUARE, **HEADS,
    )  # fmt: skip
    expected = by_sequence(tensors, Q_LENGTHS, K_LENGTHS, causal)[0]
    assert_close(out, OUT[target or source](expected))


def test_prompt_of_one_sequence() -> None:
    tensors = [x[0] for x in inputs()]
    out = torch_npu.npu_prompt_flash_attention(*tensors, input_layout="NSD", **HEADS)
    assert_close(out, attention(*(x[None] for x in tensors))[0][0])
    out, lse = torch_npu.npu_fused_infer_attention_score(*tensors, input_layout="NSD", **HEADS)
    assert_close(out, attention(*(x[None] for x in tensors))[0][0])
    assert lse.shape == (0,)


def test_a_mask_of_the_prompt_is_causal_unless_told() -> None:
    tensors = inputs()
    mask = torch.zeros(SQ, SKV, dtype=torch.bool)
    options = {"input_layout": "BNSD", "atten_mask": mask, **HEADS}
    out = torch_npu.npu_prompt_flash_attention(*tensors, **options)
    assert_close(out, attention(*tensors, torch.ones(SQ, SKV, dtype=torch.bool).tril())[0])
    out, _ = torch_npu.npu_fused_infer_attention_score(*tensors, **options)
    assert_close(out, attention(*tensors)[0])
