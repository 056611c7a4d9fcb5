"""Lengths of padded batches, which the public function of dense attention takes outside TND."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from support.attention import attention, to_layout
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.nn.functional import pad

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, NK, SQ, SKV, D, DV, DR = 3, 4, 2, 6, 7, 8, 4, 2
QUERIES, KEYS = [6, 2, 0], [4, 7, 3]
LENGTHS = {"actual_seq_lengths_query": QUERIES, "actual_seq_lengths_key": KEYS}
LAYOUTS = ["BNSD", "BSND", "BSH", "SBH"]


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def tensors() -> dict[str, Tensor]:
    """In BNSD, with NaN in the padding."""
    shapes = {
        "query": (N, SQ, D), "key": (NK, SKV, D), "value": (NK, SKV, DV),
        "query_rope": (N, SQ, DR), "key_rope": (NK, SKV, DR),
    }  # fmt: skip
    made = {name: random(B, *shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    for name, x in made.items():
        lengths = QUERIES if name.startswith("query") else KEYS
        for row, length in zip(x, lengths, strict=True):
            row[:, length:] = torch.nan
    return made


def kept(mode: int, queries: int, keys: int, pre: int, after: int, prefix: int) -> Tensor:
    """The keys of one sequence that a mode keeps."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    shift = keys - queries
    if mode == 2:
        return j <= i
    if mode == 3:
        return j <= i + shift
    if mode == 4:
        return (j >= i + shift - pre) & (j <= i + shift + after)
    if mode == 6:
        return (j < prefix) | (j <= i + shift)
    if mode == 0:
        return (j >= i - pre) & (j <= i + after)
    return torch.ones(queries, keys, dtype=torch.bool)


def stated(
    x: dict[str, Tensor], scale: float, keep: list[Tensor], bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out and the log-sum-exp of the valid tokens of each batch; zeros elsewhere."""
    query, key = (torch.cat((x[name], x[f"{name}_rope"]), -1) for name in ("query", "key"))
    biases = None if bias is None else scale * bias.expand(B, N, SQ, SKV)
    outs, lses = [], []
    for b, (queries, keys) in enumerate(zip(QUERIES, KEYS, strict=True)):
        out, lse = attention(
            query[b : b + 1, :, :queries], key[b : b + 1, :, :keys],
            x["value"][b : b + 1, :, :keys], keep[b], scale,
            0.0 if biases is None else biases[b, :, :queries, :keys], sink=sink,
        )  # fmt: skip
        outs.append(pad(out[0], (0, 0, 0, SQ - queries)))
        lses.append(pad(lse[0], (0, SQ - queries)))
    return torch.stack(outs), torch.stack(lses)


CALLS: list[dict[str, Any]] = [
    {},
    {"sparse_mode": 2},
    {"sparse_mode": 3},
    {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 1},
    {"sparse_mode": 6, "prefix": [2, 6, 3]},
    {"sparse_mode": 3, "sink": random(N, seed=9)},
    {"pse_shift": random(B, N, SQ, SKV, seed=8)},
    {"pse_shift": random(1, N, SQ, SKV, seed=8), "sparse_mode": 3},
    {"pse_shift": random(B, N, 1, SKV, seed=8)},
    {"pse_shift": random(1, N, 1, SKV, seed=8)},
]
MASKS = [
    (B, N, SQ, SKV),
    (B, 1, SQ, SKV),
    (1, 1, SQ, SKV),
    (SQ, SKV),
    (B, 1, 1, SKV),
    (1, N, 1, SKV),
]
CALLS += [{"sparse_mode": mode, "mask": shape} for shape in MASKS for mode in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS, ids=lambda x: "-".join(map(str, x)) or "plain")
def test_each_sequence_is_computed_by_itself(call: dict[str, Any], layout: str) -> None:
    options = dict(call)
    mode, scale = options.get("sparse_mode", 0), 0.3
    pre, after = options.get("pre_tokens", 100), options.get("next_tokens", 100)
    prefixes = options.get("prefix", [0] * B)
    keep = [kept(mode, *x, pre, after, p) for *x, p in zip(QUERIES, KEYS, prefixes, strict=True)]
    shape = options.pop("mask", None)
    if shape is not None:
        mask = random(*shape, seed=5) > 0
        options["attn_mask"] = mask
        full = mask.expand(B, N, SQ, SKV)
        keep = [full[b, :, :q, :k] for b, (q, k) in enumerate(zip(QUERIES, KEYS, strict=True))]
    leaves = {name: x.requires_grad_() for name, x in tensors().items()}
    sink = options.get("sink")
    wanted = [*leaves.values(), *([] if sink is None else [sink.requires_grad_()])]
    given = {name: to_layout(x, layout) for name, x in leaves.items()}
    out, softmax_max, softmax_sum = ops.flash_attention_score(
        **given, num_heads=N, layout=layout, scale_value=scale, **LENGTHS, **options
    )
    expected, lse = stated(leaves, scale, keep, options.get("pse_shift"), sink)
    torch.testing.assert_close(out, to_layout(expected, layout))
    assert softmax_max.shape == softmax_sum.shape == (B, N, SQ, 8)
    for b, (queries, keys) in enumerate(zip(QUERIES, KEYS, strict=True)):
        for statistic in (softmax_max, softmax_sum):
            assert not statistic[b, :, queries:].any()
        rows = keep[b].expand(N, queries, keys).any(-1) if sink is None else ...
        actual = ops.log_sum_exp(softmax_max[b, :, :queries, 0], softmax_sum[b, :, :queries, 0])
        torch.testing.assert_close(actual[rows], lse[b, :, :queries][rows])
    d_out = random(*out.shape, seed=7)
    actual = torch.autograd.grad(out, wanted, d_out)
    for x, y in zip(
        actual, torch.autograd.grad(to_layout(expected, layout), wanted, d_out), strict=True
    ):
        torch.testing.assert_close(x, y.nan_to_num(0))
    if sink is None:
        check_gradient_function(given, (out, softmax_max, softmax_sum), d_out, layout, options)


def check_gradient_function(
    given: dict[str, Tensor],
    outputs: tuple[Tensor, ...],
    d_out: Tensor,
    layout: str,
    options: dict[str, Any],
) -> None:
    """It takes no ropes: the call is one without them."""
    plain = {name: x.detach().requires_grad_() for name, x in given.items() if "rope" not in name}
    options = {**options, **LENGTHS, "num_heads": N, "layout": layout, "scale_value": 0.3}
    out, *statistics = ops.flash_attention_score(**plain, **options)
    expected = torch.autograd.grad(out, list(plain.values()), d_out)
    if "attn_mask" in options:
        options["atten_mask"] = ~options.pop("attn_mask")
    if options.get("sparse_mode", 0) >= 2:
        options["atten_mask"] = ops.masks.compressed_mask(options["sparse_mode"], out.device)
    detached = [x.detach() for x in (*plain.values(), d_out, *statistics, out)]
    assert_same_bits(ops.flash_attention_score_grad(*detached, **options), expected)


@pytest.mark.parametrize(
    "lengths", [LENGTHS, {"actual_seq_lengths_key": torch.tensor(KEYS)}], ids=str
)
def test_dropout_is_drawn_for_the_scores(lengths: dict[str, Any]) -> None:
    x = {name: t.nan_to_num(0) for name, t in tensors().items() if "rope" not in name}
    options: dict[str, Any] = {"num_heads": N, "layout": "BNSD", **lengths}
    whole, *_ = ops.flash_attention_score(**x, **options)
    dropped, *_ = ops.flash_attention_score(**x, **options, dropout_p=0.5)
    assert dropped.shape == whole.shape
    assert not torch.equal(dropped, whole)


def test_full_lengths_are_none() -> None:
    x = {name: t.nan_to_num(0) for name, t in tensors().items()}
    options: dict[str, Any] = {"num_heads": N, "layout": "BNSD", "sparse_mode": 3}
    full = {"actual_seq_lengths_query": [SQ] * B, "actual_seq_lengths_key": [SKV] * B}
    for lengths in (full, {"actual_seq_lengths_query": []}):
        assert_same_bits(
            ops.flash_attention_score(**x, **options, **lengths),
            ops.flash_attention_score(**x, **options),
        )


def test_compiled() -> None:
    x = {name: t.nan_to_num(0) for name, t in tensors().items() if "rope" not in name}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.flash_attention_score(
            query, key, value, num_heads=N, layout="BNSD", sparse_mode=3, **LENGTHS
        )[0]

    expected = ops.flash_attention_score(**x, num_heads=N, layout="BNSD", sparse_mode=3, **LENGTHS)
    assert_same_bits((attend(**x),), expected[:1])


WRONG = [
    ({"actual_seq_lengths_query": [1, 2]}, "_query: expected one count .*, 3, in"),
    ({"actual_seq_lengths_key": [1, 2, 8]}, r"actual_seq_lengths_key: expected counts in 0..S = 7"),
    ({"actual_seq_lengths_key": [1, -1, 3]}, "counts in 0..S = 7, got -1 at 1"),
    ({**LENGTHS, "sparse_mode": 5}, "sparse_mode: expected one of 0, 1, 2, 3, 4, 6 beside"),
    ({**LENGTHS, "sparse_mode": 7}, "sparse_mode: expected one of 0, 1, 2, 3, 4, 6 beside"),
    ({**LENGTHS, "attn_mask": torch.ones(B, SKV) > 0}, r"attn_mask: .*mask\[:, None, None\]"),
    ({**LENGTHS, "atten_mask": torch.ones(2, SKV) > 0}, r"atten_mask: .* got \[2, 7\] "),
    ({**LENGTHS, "pse_shift": random(B, N, 1024, SKV)}, "pse_shift: expected .B or 1, N, Sq or 1"),
    ({**LENGTHS, "query_rope": random(B, N, 1, 2)}, "query_rope: expected query's shape but"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_calls(options: dict[str, Any], words: str) -> None:
    x = {name: t for name, t in tensors().items() if "rope" not in name}
    with pytest.raises(ValueError, match="^ascend::flash_attention_score: .*" + words):
        ops.flash_attention_score(**x, num_heads=N, layout="BNSD", **options)


@pytest.mark.parametrize("name", ["query", "value", "atten_mask", "pse_shift", "query_rope"])
def test_sparse_tensors_are_refused_by_name(name: str) -> None:
    x: dict[str, Any] = {
        "atten_mask": torch.ones(SQ, SKV) < 0, "pse_shift": random(B, N, SQ, SKV), **tensors()
    }  # fmt: skip
    x[name] = x[name].to_sparse()
    words = f"^ascend::flash_attention_score: {name}: expected a dense tensor, got torch.sparse_coo"
    with pytest.raises(NotImplementedError, match=words):
        ops.flash_attention_score(**x, num_heads=N, layout="BNSD", **LENGTHS)


def test_torch_ops_takes_no_lengths_of_batches() -> None:
    x = {name: t for name, t in tensors().items() if "rope" not in name}
    with pytest.raises(ValueError, match="actual_seq_lengths_query: expected None in layout BNSD"):
        torch.ops.ascend.flash_attention_score(
            **x, num_heads=N, layout="BNSD", scale_value=1.0, **LENGTHS
        )
