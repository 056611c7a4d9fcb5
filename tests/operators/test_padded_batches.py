"""Lengths of padded batches, which dense attention takes outside TND."""

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


def stated(
    x: dict[str, Tensor], scale: float, keep: list[Tensor], bias: Tensor | None,
    sink: Tensor | None, weight: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and the log-sum-exp of the valid tokens of each batch; zeros elsewhere.

    weight: (B, N, SQ, SKV), of dropout.
    """
    query, key = (torch.cat((x[name], x[f"{name}_rope"]), -1) for name in ("query", "key"))
    biases = None if bias is None else scale * bias.expand(B, N, SQ, SKV)
    outs, lses = [], []
    for b, (queries, keys) in enumerate(zip(QUERIES, KEYS, strict=True)):
        out, lse = attention(
            query[b : b + 1, :, :queries], key[b : b + 1, :, :keys],
            x["value"][b : b + 1, :, :keys], keep[b], scale,
            0.0 if biases is None else biases[b, :, :queries, :keys],
            weight[b, :, :queries, :keys], sink,
        )  # fmt: skip
        outs.append(pad(out[0], (0, 0, 0, SQ - queries)))
        lses.append(pad(lse[0], (0, SQ - queries)))
    return torch.stack(outs), torch.stack(lses)


CALLS: list[dict[str, Any]] = [
    {}, {"sparse_mode": 2}, {"sparse_mode": 3},
    {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 1}, {"sparse_mode": 6, "prefix": [2, 6, 3]},
    {"sparse_mode": 3, "sink": random(N, seed=9)}, {"sparse_mode": 3, "keep_prob": 0.5},
    {"keep_prob": 0.75, "sink": random(N, seed=9)}, {"pse_shift": random(B, N, SQ, SKV, seed=8)},
    {"pse_shift": random(1, N, SQ, SKV, seed=8), "sparse_mode": 3},
    {"pse_shift": random(B, N, 1, SKV, seed=8)}, {"pse_shift": random(1, N, 1, SKV, seed=8)},
]  # fmt: skip
MASKS = [
    (B, N, SQ, SKV), (B, 1, SQ, SKV), (1, 1, SQ, SKV), (SQ, SKV), (B, 1, 1, SKV), (1, N, 1, SKV),
]  # fmt: skip
CALLS += [{"sparse_mode": mode, "mask": shape} for shape in MASKS for mode in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", CALLS, ids=lambda x: "-".join(map(str, x)) or "plain")
def test_each_sequence_is_computed_by_itself(call: dict[str, Any], layout: str) -> None:
    options = dict(call)
    mode, scale = options.get("sparse_mode", 0), 0.3
    band = {name: options[name] for name in ("pre_tokens", "next_tokens") if name in options}
    keep = [
        ops.sparse_mode_mask(mode, *x, prefix=prefix, **band)
        for *x, prefix in zip(QUERIES, KEYS, options.get("prefix", [0] * B), strict=True)
    ]
    shape = options.pop("mask", None)
    if shape is not None:
        mask = random(*shape, seed=5) > 0
        options["attn_mask"] = mask
        full = mask.expand(B, N, SQ, SKV)
        keep = [full[b, :, :q, :k] for b, (q, k) in enumerate(zip(QUERIES, KEYS, strict=True))]
    weight = torch.ones(B, N, SQ, SKV)
    if "keep_prob" in options:
        bits = random(B, N, SQ, SKV, seed=6) > 0
        options["drop_mask"] = (bits.view(-1, 8) * (1 << torch.arange(8))).sum(1).byte()
        weight = bits / options["keep_prob"]
    leaves = {name: x.requires_grad_() for name, x in tensors().items()}
    sink, bias = (options.get(name) for name in ("sink", "pse_shift"))
    others = [x.requires_grad_() for x in (sink, bias) if x is not None]
    wanted = [*leaves.values(), *others]
    given = {name: to_layout(x, layout) for name, x in leaves.items()}
    out, softmax_max, softmax_sum = ops.flash_attention_score(
        **given, num_heads=N, layout=layout, scale_value=scale, **LENGTHS, **options
    )
    expected, lse = stated(leaves, scale, keep, bias, sink, weight)
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
    gradients = torch.autograd.grad(to_layout(expected, layout), wanted, d_out)
    torch.testing.assert_close(actual, tuple(x.nan_to_num(0) for x in gradients))
    for x in others:
        x.requires_grad_(False)
    if sink is None:
        check_gradient_function(given, d_out, layout, options)


def check_gradient_function(
    given: dict[str, Tensor], d_out: Tensor, layout: str, options: dict[str, Any]
) -> None:
    """It takes no ropes: the call is one without them."""
    plain = {name: x.detach().requires_grad_() for name, x in given.items() if "rope" not in name}
    options = {**options, **LENGTHS, "num_heads": N, "layout": layout, "scale_value": 0.3}
    out, *statistics = ops.flash_attention_score(**plain, **options)
    expected = torch.autograd.grad(out, list(plain.values()), d_out)
    if "attn_mask" in options:
        options["atten_mask"] = ~options.pop("attn_mask")
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
