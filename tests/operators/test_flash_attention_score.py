"""flash_attention_score: its decisions, what its function adds, and torch's own attention."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import ascend_attn_ops
import pytest
import torch
from ascend_attn_check.samples.flash_attention_score import CASES, FlashCase, build
from ascend_attn_check.samples.masks import compressed_mask as sample_mask
from ascend_attn_ops import reference, sparse_mode_mask
from ascend_attn_ops.__main__ import main
from ascend_attn_ops._core.sparse_modes import compressed_mask
from ascend_attn_ops.ops._dense_attention import draw_drop_mask
from ascend_attn_ops.reference.bounds.expected import within
from support.attention import qkv
from support.samples import OPERATORS
from support.tolerance import assert_same_bits
from support.turns import by_turns
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

pytestmark = [
    pytest.mark.usefixtures("no_limits"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

FLT_MAX = torch.finfo(torch.float32).max
B, N, D = 2, 4, 16


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return ascend_attn_ops.flash_attention_score(
        q, k, v, num_heads=q.shape[1], layout="BNSD", **options
    )[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_without_keys(dtype: torch.dtype) -> None:
    """DECISION: always zero, with the statistics that inner_precise = 2 gives on the device."""
    for case in (
        FlashCase(s=(9, 4), mode=3),
        FlashCase(s=(9, 4), mode=1, pattern="rows"),
        FlashCase(s=(20, 40), mode=4, pre=-5, next=30),
    ):
        sample = build(case, dtype)
        out, softmax_max, softmax_sum = sample.call(torch.ops.ascend)
        empty = softmax_sum[..., 0] == FLT_MAX
        assert empty.any()
        assert not out[empty].any()
        assert (softmax_max[empty] == -FLT_MAX).all()
        leaf = sample.requires_grad(("query",))
        out = leaf.call(torch.ops.ascend)[0]
        (d_query,) = torch.autograd.grad(out.sum(), [leaf.inputs["query"]])
        assert not d_query[empty].any()
        assert d_query.isfinite().all()


@pytest.mark.parametrize(("sq", "skv", "mode"), [(9, 12, 0), (32, 32, 2), (64, 128, 3)])
def test_rows_of_few_keys(sq: int, skv: int, mode: int) -> None:
    """Where no sum over many keys hides that their weights are rounded to bfloat16."""
    batch = 600
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, 4, s, D, generator=generator).bfloat16() for s in (sq, skv, skv))
    actual = attend(q, k, v, sparse_mode=mode)
    kept = sparse_mode_mask(mode, sq, skv)
    q, k, v = q.double(), k.double(), v.double()
    expected, terms = (scaled_dot_product_attention(q, k, x, attn_mask=kept) for x in (v, v.abs()))
    within("out", expected, terms, torch.bfloat16).check(actual)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_results_half_way_are_rounded_to_even(dtype: torch.dtype) -> None:
    """The mean of two neighbours, of which each that follows is the other way from the even one."""
    q, k = torch.zeros(1, 1, 1, D, dtype=dtype), torch.zeros(1, 1, 2, D, dtype=dtype)
    steps = 1 + torch.arange(D + 1, dtype=torch.float64) * torch.finfo(dtype).eps
    v = torch.stack((steps[:-1], steps[1:])).to(dtype)
    assert torch.equal(attend(q, k, v[None, None]).flatten(), v.double().mean(0).to(dtype))


@pytest.mark.parametrize("mode", [0, 4])
@pytest.mark.parametrize("most", [2**31 - 1, 2**63 - 1])
def test_tokens_that_bound_nothing(mode: int, most: int) -> None:
    """Also where sums with them are more than an integer holds."""
    q, k, v = qkv(5, 9)
    mask = torch.zeros(5, 9, dtype=torch.bool) if mode == 0 else None
    options = {"scale_value": D**-0.5, "pre_tokens": most, "next_tokens": most}
    for functions in (ascend_attn_ops, reference):
        out, *_ = functions.flash_attention_score(
            q, k, v, num_heads=N, layout="BNSD", sparse_mode=mode, atten_mask=mask, **options
        )
        torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(
    "case",
    [
        # The first row that is stored serves queries 0, 1024 and 1028.
        FlashCase(b=1, s=(2052, 2052), heads=(1, 1), d=(4, 4), mode=2, pse="rows"),
        # All rows are stored, and any mask will do.
        FlashCase(b=1, s=(1024, 1024), heads=(1, 1), d=(4, 4), mode=1, mask="", pse="rows"),
    ],
    ids=lambda case: case.id,
)
def test_a_bias_of_1024_rows(case: FlashCase) -> None:
    sample = build(case, torch.float32)
    record = OPERATORS["flash_attention_score"]
    record.bounds.check(sample, sample.call(torch.ops.ascend))


def test_a_bias_of_1024_rows_and_no_batch() -> None:
    """There is no sequence that its mask could be wrong for."""
    query = torch.zeros(0, 2048, 1, 16, requires_grad=True)
    mask = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    bias = torch.zeros(1, 1, 1024, 2048, requires_grad=True)
    outputs = torch.ops.ascend.flash_attention_score(
        query, query, query, pse_shift=bias, atten_mask=mask, scale_value=1.0, num_heads=1,
        layout="BSND", next_tokens=0,
    )  # fmt: skip
    assert outputs[0].shape == query.shape
    outputs[0].sum().backward()
    assert query.grad is not None
    assert query.grad.shape == query.shape
    assert bias.grad is not None
    assert not bias.grad.any()


def test_without_a_mask_mode_0_keeps_every_key() -> None:
    """The tokens have no effect, as in aclnn; modes that need a mask are refused without one."""
    q, k, v = qkv(5, 5)
    options = {"num_heads": N, "layout": "BNSD", "scale_value": 0.3, "sparse_mode": 0}
    expected = torch.ops.ascend.flash_attention_score(q, k, v, **options)
    band = torch.ops.ascend.flash_attention_score(q, k, v, **options, pre_tokens=1, next_tokens=0)
    assert_same_bits(band, expected)
    dense = scaled_dot_product_attention(q, k, v, scale=0.3)
    torch.testing.assert_close(expected[0], dense)


def test_a_symbolic_length_beside_real_tensors_is_an_error() -> None:
    length = ShapeEnv().create_unbacked_symint()
    q = torch.randn(5, 2, 8, dtype=torch.float64)
    lengths = {f"actual_seq_lengths_{name}": [2, length] for name in ("query", "key")}
    with pytest.raises(RuntimeError, match="specialized integer"):
        ascend_attn_ops.flash_attention_score(q, q, q, num_heads=2, layout="TND", **lengths)


@by_turns(3)
@pytest.mark.parametrize("pse_type", [0, 1])
@pytest.mark.parametrize("case", [c for c in CASES if c.pse and c.pse_type < 2], ids=lambda c: c.id)
def test_gradient_of_pse(case: FlashCase, pse_type: int) -> None:
    """DECISION: on the CPU there is one, of the pse_shift that is a tensor of values."""
    sample = build(case, torch.float64).replace(pse_type=pse_type).requires_grad(("pse_shift",))
    pse = sample.options["pse_shift"]
    out = sample.call(torch.ops.ascend)[0]
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    (actual,) = torch.autograd.grad(out, [pse], d_out)
    (expected,) = torch.autograd.grad(sample.call(reference)[0], [pse], d_out)
    torch.testing.assert_close(actual, expected)


def test_only_the_first_start_indices_count_and_only_with_that_of_the_keys() -> None:
    sample = build(FlashCase(s=(6, 6), pse="N", pse_type=2), torch.float64)
    expected = sample.call(torch.ops.ascend)
    options = {"q_start_idx": None, "kv_start_idx": None, **sample.options}

    def call(q_start: list[int] | None, kv_start: list[int] | None) -> tuple[Tensor, ...]:
        starts = {"q_start_idx": q_start, "kv_start_idx": kv_start}
        return replace(sample, options={**options, **starts}).call(torch.ops.ascend)

    assert_same_bits(call([9], None), expected)
    assert_same_bits(call([9], []), expected)
    assert_same_bits(call(None, [4]), call([0], [4]))
    assert_same_bits(call([1, 9], [4, 7]), call([0], [3]))
    assert not torch.equal(call([9], [4])[0], expected[0])


@pytest.mark.parametrize("argument", ["q_start_idx", "kv_start_idx"])
@pytest.mark.parametrize("start", [-(2**63), -(2**61) - 1, 2**61 + 1, 2**63 - 1])
def test_positions_whose_distance_overflows(argument: str, start: int) -> None:
    sample = build(FlashCase(s=(6, 6), pse="N", pse_type=2), torch.float64)
    starts = {"q_start_idx": [2**61], "kv_start_idx": [-(2**61)]}
    largest = replace(sample, options={**sample.options, **starts})
    torch.testing.assert_close(largest.call(torch.ops.ascend), largest.call(reference))
    outside = replace(sample, options={**sample.options, **starts, argument: [start]})
    with pytest.raises(ValueError, match=rf"{argument}: expected a first .*, got {start} "):
        outside.call(torch.ops.ascend)


def test_packed_pse_of_either_size_is_the_full_one() -> None:
    """DECISION: sum(Sq * Skv) may be T2, and then the two forms have as many elements."""
    case = FlashCase(layout="TND", lengths=((2, 0), (3, 3)), pse="full", heads=(1, 1))
    sample = build(case, torch.float64)
    pse = sample.options["pse_shift"]
    assert pse.shape == (6,)
    q, k, v = (x.transpose(0, 1)[None] for x in sample.args)
    bias = pse.view(1, 1, 2, 3) * sample.options["scale_value"]
    expected = scaled_dot_product_attention(q, k[:, :, :3], v[:, :, :3], attn_mask=bias)
    torch.testing.assert_close(sample.call(torch.ops.ascend)[0], expected[0].transpose(0, 1))
    torch.testing.assert_close(sample.call(reference), sample.call(torch.ops.ascend))


@pytest.mark.parametrize("case", [FlashCase(s=(9, 4), mode=3), FlashCase(s=(9, 12))], ids=str)
def test_inner_precise_changes_nothing_on_the_cpu(case: FlashCase) -> None:
    sample = build(case, torch.float32)
    expected = sample.call(torch.ops.ascend)
    for inner_precise in (1, 2, -1, 4):
        options = {**sample.options, "inner_precise": inner_precise}
        assert_same_bits(replace(sample, options=options).call(torch.ops.ascend), expected)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_scores_are_selected_and_not_added(dtype: torch.dtype, mode: int) -> None:
    """A masked score has no effect, in either direction."""
    sample = build(FlashCase(s=(9, 12), mode=mode, pse="full", pse_type=0), dtype)
    mask, pse = sample.options["atten_mask"], sample.options["pse_shift"]
    results = []
    for noise in (0.0, torch.nan, torch.inf, -torch.inf):
        leaf = sample.replace(pse_shift=pse.masked_fill(mask, noise)).requires_grad(
            ("query", "key")
        )
        out = leaf.call(torch.ops.ascend)[0]
        leaves = [leaf.inputs["query"], leaf.inputs["key"]]
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        assert_same_bits(results[-1], results[0])


def test_slopes_have_no_gradient() -> None:
    q, k, v = qkv(5, 5)
    slopes = torch.ones(N, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"pse_shift: expected no gradient .* detach"):
        attend(q, k, v, pse_shift=slopes, pse_type=2)


@pytest.mark.parametrize("mode", [2, 3, 4, 6, 7, 8])
def test_compressed_masks(mode: int) -> None:
    """The operator refuses others, and needs none."""
    tensors = [x.float() for x in qkv(5, 5)]
    options = {"sparse_mode": mode} | ({"prefix": [3, 4]} if mode == 6 else {})
    mask = compressed_mask(mode, torch.device("cpu"))
    assert torch.equal(mask, sample_mask(mode, torch.bool))
    if mode < 7:  # which only packs have
        without = attend(*tensors, **options)
        assert_same_bits((attend(*tensors, **options, atten_mask=mask),), (without,))
        with pytest.raises(ValueError, match="got other values"):
            attend(*tensors, **options, atten_mask=~mask)


@pytest.mark.parametrize("options", [{"sparse_mode": 4}, {"sparse_mode": 6, "prefix": [3, 4]}])
def test_masks_need_no_mode_of_torch(options: dict[str, Any]) -> None:
    tensors = [x.float().requires_grad_() for x in qkv(5, 5)]
    with torch.inference_mode():
        expected = attend(*tensors, **options)
    attend(*tensors, **options).sum().backward()
    with FakeTensorMode() as mode:
        attend(*(mode.from_tensor(x) for x in tensors), **options)
    assert_same_bits((attend(*tensors, **options),), (expected,))


@pytest.mark.parametrize(
    "options", [{"sparse_mode": 3}, {"sparse_mode": 0, "dropout_p": 0.3}], ids=str
)
def test_the_public_function_compiles_once_for_all_sizes(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        partial(attend, **options), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
        warnings.simplefilter("error", UserWarning)
        for sq, skv in ((6, 9), (8, 12), (9, 13)):
            tensors = qkv(sq, skv)
            results = []
            for function in (compiled, partial(attend, **options)):
                torch.manual_seed(0)
                leaves = [x.requires_grad_() for x in tensors]
                out = function(*leaves)
                results.append((out, *torch.autograd.grad(out.sum(), leaves)))
            assert_same_bits(*results)


def test_dropout_is_drawn_from_the_generator() -> None:
    q, k, v = (x.float() for x in qkv(40, 50))
    outs = []
    for seed in (3, 3, 4):
        generator = torch.Generator().manual_seed(seed)
        outs.append(attend(q, k, v, dropout_p=0.25, generator=generator))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    # As many bytes as torch_npu allocates.
    assert draw_drop_mask(B * N * 40 * 51, 0.5, q.device).shape == (
        -(-B * N * 40 * 51 // 128) * 16,
    )


def test_mask_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["mask", "--mode", "4", "--sq", "3", "--skv", "4", "--pre", "1", "--next", "0"]
    assert main(options) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        " 0 ■ ■ · ·", " 1 · ■ ■ ·", " 2 · · ■ ■",
    ]  # fmt: skip


# It is what torch's flex_attention gives. tests/programs/test_attention_program.py compares what
# scaled_dot_product_attention can express.

each_group = pytest.mark.parametrize("key_heads", [N, 2, 1])


@each_group
@pytest.mark.parametrize("root", [False, True], ids=["distance", "root"])
@pytest.mark.parametrize("start", [(0, 0), (5, 40)])
def test_alibi(root: bool, start: tuple[int, int], key_heads: int) -> None:
    """Slopes, made by the kernel from positions, are what a score_mod computes."""
    s = 70
    q, k, v = qkv(s, s, key_heads)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (j + start[1] - i - start[0]).abs().double()
        return score - slopes.double()[h] * (distance.sqrt() if root else distance)

    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, s, s, device="cpu")
    expected = flex_attention(q, k, v, score_mod=alibi, block_mask=mask, enable_gqa=True)
    actual = attend(
        q, k, v, sparse_mode=3, pse_shift=slopes, pse_type=3 if root else 2,
        q_start_idx=[start[0]], kv_start_idx=[start[1]],
    )  # fmt: skip
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("mode", [0, 2, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_pse_of_1024_rows(mode: int, batch: int) -> None:
    """Values of the distance alone, of which the last rows are stored: ALiBi of flex_attention."""
    s = 1500
    q, k, v = (x[..., :8] for x in qkv(s, s))
    i, j = torch.arange(s)[:, None], torch.arange(s)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.3, 0.2, 0.1, 0.05]).double()
    slopes = slopes.view(2, N)[:batch]
    full = -slopes[..., None, None] * (i - j).abs()

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[b % batch, h] * (i - j).abs()

    mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, s, s, device="cpu")
    expected = flex_attention(q, k, v, score_mod=alibi, block_mask=mask)
    causal = {"atten_mask": i < j} if mode == 0 else {}
    results = []
    for pse in (full[:, :, -1024:].contiguous(), full):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, sparse_mode=mode, pse_shift=pse, pse_type=0, **causal)
        torch.testing.assert_close(out, expected)
        results.append(torch.autograd.grad(out.square().sum(), leaves))
    torch.testing.assert_close(*results)
