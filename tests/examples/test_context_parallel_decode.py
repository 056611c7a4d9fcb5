"""Decoding with keys on several ranks: its parts alone, and the example as a user runs it."""

from __future__ import annotations

import re
from types import ModuleType

import ascend_attn_ops as ops
import pytest
import torch
from support.attention import attention
from support.checkout import EXAMPLES
from support.example_runs import run, start, torchrun
from support.turns import nightly

SCRIPT = EXAMPLES / "context_parallel_decode.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import context_parallel_decode

    return context_parallel_decode


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_merged_parts_are_the_softmax_over_all_keys(example: ModuleType, ranks: int) -> None:
    """In float64, over a selection that leaves some ranks without keys, and one row without any."""
    length, heads = 70, 3
    latent, rope = normal(length, 1, example.LATENT), normal(length, 1, example.ROPE)
    query, query_rope = normal(1, 3, heads, example.LATENT), normal(1, 3, heads, example.ROPE)
    indices = torch.full((1, 3, 1, 9), -1, dtype=torch.int32)
    indices[0, 0, 0] = torch.tensor([69, 3, 40, 17, 16, 55, 8, 31, 64])
    indices[0, 1, 0, :2] = torch.tensor([5, 1])
    lengths = torch.tensor([length], dtype=torch.int32)
    parts = []
    with ops.limits(None):
        for rank in range(ranks):
            part = example.Part(rank, ranks)
            cache = example.Cache.empty(part, 1, length, example.Sparse.shapes, latent)
            cache.write(latent[None], rope[None], torch.arange(length)[None])
            parts.append(example.attend_to_selection(cache, query, query_rope, indices, lengths))
        out, _ = ops.attention_update([lse for _, lse in parts], [x for x, _ in parts])
    keep = (indices[0].transpose(1, 2) == torch.arange(length)).any(1)
    q, key = torch.cat((query, query_rope), -1), torch.cat((latent, rope), -1)
    q, key, value = (x.transpose(1, 2) for x in (q, key[None], latent[None]))
    expected, _ = attention(q, key, value, keep, example.SCALE)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("new", [1, 9])
def test_merged_parts_are_the_softmax_over_the_keys_before(
    example: ModuleType, ranks: int, new: int
) -> None:
    """In float64, over sequences of which some ranks have no key, and of an odd length."""
    key, value = (normal(3, 70, example.KEY_HEADS, example.HEAD_SIZE) for _ in range(2))
    query = normal(3, new, example.HEADS, example.HEAD_SIZE)
    lengths = torch.tensor([70, 5, 33], dtype=torch.int32)
    at = torch.arange(70).expand(3, -1)
    written = torch.where(at < lengths[:, None], at, -1)
    positions = (lengths[:, None] - new + torch.arange(new)).clamp(min=-1)
    parts = []
    with ops.limits(None):
        for rank in range(ranks):
            part = example.Part(rank, ranks)
            cache = example.Cache.empty(part, 3, 70, example.Dense.shapes, key)
            cache.write(key, value, written)
            parts.append(example.attend_to_all(cache, query, positions, lengths))
        out, _ = ops.attention_update([lse for _, lse in parts], [x for x, _ in parts])
    assert any(bool(lse.isneginf().all(-1).any()) for _, lse in parts) == (ranks > 1 or new > 5)
    keep = (torch.arange(70) <= positions[..., None])[:, None]
    scale = example.HEAD_SIZE**-0.5
    expected, _ = attention(*(x.transpose(1, 2) for x in (query, key, value)), keep, scale)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("attention", "ranks"),
    [
        ("sparse", 2),
        pytest.param("sparse", 3, marks=nightly),
        pytest.param("dense", 2, marks=nightly),
    ],
)
def test_ranks_decode_what_one_decodes(attention: str, ranks: int) -> None:
    printed = run(*torchrun(ranks, str(SCRIPT), "--steps=3", f"--attention={attention}"))
    expected = rf"{ranks} ranks, {attention} attention, 3 steps of 3 sequences: .* is (\S+)"
    assert re.search(expected, printed), printed


def test_says_how_to_start_it() -> None:
    assert "torchrun --nproc-per-node 2" in start(str(SCRIPT)).err
