"""Masks beside pre_tokens and next_tokens in sparse_mode 0.

The device uses the tokens to leave out whole tiles only, so the mask that arrives has to mask what
they exclude.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from arrivals import arriving
from support.samples import Sample
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, SQ, SKV, D = 2, 3, 7, 9, 16
ENDS, KEY_ENDS = [4, 4, 9], [6, 9, 14]


def outside(queries: int, keys: int, pre: int, following: int) -> Tensor:
    """The pairs of query and key that the tokens exclude."""
    excluded = [
        [key < query - pre or key > query + following for key in range(keys)]
        for query in range(queries)
    ]
    return torch.tensor(excluded)


def sample_of(layout: str, mask: Tensor, **options: Any) -> Sample:
    tokens = (B, SQ), (B, SKV)
    if layout == "TND":
        tokens = ENDS[-1:], KEY_ENDS[-1:]
        options |= {
            "actual_seq_lengths_query": list(ENDS), "actual_seq_lengths_key": list(KEY_ENDS)
        }  # fmt: skip
    torch.manual_seed(0)
    query, key = (torch.randn(*x, N, D).half() for x in tokens)
    options = {"num_heads": N, "layout": layout, "scale_value": 0.25, **options}
    inputs = {"query": query, "key": key, "value": key}
    return Sample("flash_attention_score", layout, inputs, {"atten_mask": mask, **options})


def gradient_of(sample: Sample) -> Sample:
    out, softmax_max, softmax_sum = sample.call(torch.ops.ascend)
    inputs = {
        **sample.inputs, "dy": out, "softmax_max": softmax_max, "softmax_sum": softmax_sum,
        "attention_in": out,
    }  # fmt: skip
    return Sample("flash_attention_score_grad", sample.id, inputs, sample.options)


MASKS = [(SQ, SKV), (1, 1, SQ, SKV), (B, 1, SQ, SKV), (B, N, SQ, SKV)]
TOKENS = [(2, 3), (2, 100), (100, 0), (-1, 4), (5, -2), (2**31 - 1, 1), (0, 2**62)]


def assert_arrives(sample: Sample, expected: Tensor) -> None:
    for call in (sample, gradient_of(sample)):
        mask = arriving(call, call.operator, "atten_mask")
        assert torch.equal(mask.bool(), expected.bool())


@pytest.mark.parametrize("shape", MASKS, ids=str)
@pytest.mark.parametrize(("pre", "following"), TOKENS)
def test_the_mask_has_the_band(shape: tuple[int, ...], pre: int, following: int) -> None:
    mask = torch.rand(shape) < 0.3
    sample = sample_of("BSND", mask.byte(), pre_tokens=pre, next_tokens=following)
    assert_arrives(sample, mask | outside(SQ, SKV, pre, following))


def test_a_mask_of_a_whole_pack() -> None:
    """The mask is (sum Sq, sum Skv); every sequence counts from its own first token."""
    mask = torch.rand(ENDS[-1], KEY_ENDS[-1]) < 0.3
    sample = sample_of("TND", mask, pre_tokens=3, next_tokens=1)
    for call in (sample, gradient_of(sample)):
        found = arriving(call, call.operator, "atten_mask")
        for (q0, q1), (k0, k1) in zip(pairwise([0, *ENDS]), pairwise([0, *KEY_ENDS]), strict=True):
            expected = mask[q0:q1, k0:k1] | outside(5, 6, 3, 1)[: q1 - q0, : k1 - k0]
            assert torch.equal(found[q0:q1, k0:k1], expected)


@pytest.mark.parametrize("mode", [0, 1])
def test_a_mask_that_needs_no_band_arrives_as_it_is(mode: int) -> None:
    """The tokens of mode 0 exclude nothing; mode 1 does not read them."""
    mask = torch.rand(SQ, SKV) < 0.3
    tokens = {"pre_tokens": SQ - 1, "next_tokens": SKV - 1} if mode == 0 else {"pre_tokens": 1}
    assert_arrives(sample_of("BSND", mask, sparse_mode=mode, **tokens), mask)
