"""flash_attn_with_kvcache: the cache's rows, and attention to what it holds then."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from ascend_attn_ops.flash_attn import flash_attn_with_kvcache
from support.flash_attention_in_torch import attend, cu, in_blocks
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

B, N, NK, SLOTS = 3, 4, 2, 24
D, DTYPE = 16, torch.float64
LENGTHS = [7, 0, 20]


@pytest.fixture(autouse=True, params=[(16, torch.float64), (64, torch.float16)], ids=str)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator for inference reads caches of the second kind where they are."""
    for name, value in zip(("D", "DTYPE"), request.param, strict=True):
        monkeypatch.setattr(sys.modules[__name__], name, value)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = None if DTYPE is torch.float64 else 4e-3
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def holding(lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Caches that hold NaN where nothing was written."""
    k, v = random(2, len(lengths), SLOTS, NK, D)
    for row, length in enumerate(lengths):
        k[row, length:], v[row, length:] = torch.nan, torch.nan
    return k, v


def expected_of(
    q: Tensor, k: list[Tensor], v: list[Tensor], **options: Any
) -> tuple[Tensor, Tensor]:
    """Each sequence alone."""
    slopes = options.pop("alibi_slopes", None)
    results = [
        attend(
            q[b, None], k[b][None], v[b][None], **options,
            alibi_slopes=slopes[b] if slopes is not None and slopes.dim() == 2 else slopes,
        )
        for b in range(len(q))
    ]  # fmt: skip
    out, lse = zip(*results, strict=True)
    return torch.cat(out), torch.cat(lse)


def with_slopes(options: dict[str, Any]) -> dict[str, Any]:
    options = dict(options)
    if "slopes" in options:
        options["alibi_slopes"] = torch.rand(*options.pop("slopes"), N) / 2 + 0.05
        options.setdefault("causal", True)
    return options


@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("lengths", [LENGTHS, [9, 9, 9]], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (4, 0)}, {"window_size": (6, 1)}, {"slopes": ()},
     {"causal": True, "slopes": (B,)}, {"causal": True, "s_aux": torch.arange(N).double()},
     {"causal": True, "rows": [4, 0, 2]}],
    ids=str,
)  # fmt: skip
def test_attends_to_what_the_cache_holds(
    options: dict[str, Any], lengths: list[int], new: int
) -> None:
    options = with_slopes(options)
    rows = options.pop("rows", None)
    where = {} if rows is None else {"cache_batch_idx": torch.tensor(rows, dtype=torch.int32)}
    held = dict(zip(rows or range(B), lengths, strict=True))
    caches = holding([held.get(row, 0) for row in range(max(held) + 1)])
    before = [x.clone() for x in caches]
    q, k, v = random(B, max(new, 2), N, D), random(B, new, NK, D), random(B, new, NK, D)
    out, lse = flash_attn_with_kvcache(
        q, *caches, *((k, v) if new else ()), cache_seqlens=cu(lengths),
        return_softmax_lse=True, **where, **options,
    )  # fmt: skip
    whole = [
        [torch.cat((x[row, :n], y[b])) for b, (row, n) in enumerate(held.items())]
        for x, y in zip(before, (k, v), strict=True)
    ]
    expected, expected_lse = expected_of(q, *whole, **options)
    assert_close(out, expected)
    assert_close(lse, expected_lse)
    for cache, old, x in zip(caches, before, (k, v), strict=True):
        for b, (row, n) in enumerate(held.items()):
            old[row, n : n + new] = x[b]
        assert torch.equal(cache.view(torch.int16), old.view(torch.int16))


def test_one_length_for_all_and_none() -> None:
    caches = random(2, B, SLOTS, NK, D)
    q = random(B, 1, N, D)
    expected, _ = attend(q, *caches[:, :, :5])
    assert_close(flash_attn_with_kvcache(q, *caches, cache_seqlens=5), expected)
    expected, _ = attend(q, *caches)
    assert_close(flash_attn_with_kvcache(q, *caches), expected)
    # Rows behind the batch are not looked at.
    assert_close(flash_attn_with_kvcache(q[:2], *caches), expected[:2])


@pytest.mark.parametrize("new", [0, 1, 5])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_blocks(block_size: int, new: int) -> None:
    """The same as with a cache that is not paged, whatever the order of the blocks."""
    q, k, v = random(B, 2, N, D), random(B, new, NK, D), random(B, new, NK, D)
    plain = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 8)) for x in holding(LENGTHS)]
    appended = (k, v) if new else ()
    options: dict[str, Any] = {"cache_seqlens": cu(LENGTHS), "causal": True}
    (k_blocks, table), (v_blocks, _) = (in_blocks(x.unbind(), block_size) for x in plain)
    expected = flash_attn_with_kvcache(q, *plain, *appended, **options, return_softmax_lse=True)
    actual = flash_attn_with_kvcache(
        q, k_blocks, v_blocks, *appended, **options, block_table=table[:, :-1],
        return_softmax_lse=True,
    )  # fmt: skip
    for x, y in zip(actual, expected, strict=True):
        assert_close(x, y)


def test_a_table_padded_with_minus_one() -> None:
    q, cache = random(2, 1, N, D), random(3, 8, NK, D)
    table = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32)
    out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=cu([13, 8]), block_table=table)
    whole = [torch.cat((cache[2], cache[0]))[:13], cache[1]]
    assert_close(out, expected_of(q, whole, whole)[0])


def test_inference_mode_and_gradients() -> None:
    caches = holding(LENGTHS)
    leaf = random(B, 1, N, D).requires_grad_()
    with pytest.raises(NotImplementedError, match=r"q, .*: expected no gradient .*torch\.no_grad"):
        flash_attn_with_kvcache(leaf, *caches, cache_seqlens=cu(LENGTHS))
    with torch.no_grad():
        out = flash_attn_with_kvcache(leaf, *caches, cache_seqlens=cu(LENGTHS))
    with torch.inference_mode():
        again = flash_attn_with_kvcache(leaf, *caches, cache_seqlens=cu(LENGTHS))
    assert not out.requires_grad
    assert torch.equal(out, again)


def test_autocast_casts_what_is_written_too() -> None:
    q, k, v = random(3, B, 1, NK, D).float()
    caches = [torch.zeros(B, SLOTS, NK, D, dtype=torch.bfloat16) for _ in range(4)]
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attn_with_kvcache(q, *caches[:2], k, v, cache_seqlens=3)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    expected = flash_attn_with_kvcache(q, *caches[2:], k, v, cache_seqlens=3)
    assert torch.equal(out, expected)
    assert torch.equal(caches[0], caches[2])
    assert caches[0][:, 3].any()
