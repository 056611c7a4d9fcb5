"""Calls of packs that are often wrong in the same way hear what to change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from support import fresh
from torch import Tensor

T, N, D = 16, 4, 64
COUNTS = r"; these look like counts: pass torch.cumsum\(lengths, 0\)"


def bfloat16(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def dense(lengths: list[int], **options: Any) -> None:
    x = bfloat16(T, N, D)
    ops.flash_attention_score(
        x, x, x, num_heads=N, layout="TND", actual_seq_lengths_query=lengths,
        actual_seq_lengths_key=lengths, **options,
    )  # fmt: skip


def indexer(lengths: list[int]) -> None:
    ops.lightning_indexer(
        bfloat16(T, 8, 128), bfloat16(T, 1, 128), bfloat16(T, 8), layout="TND",
        actual_seq_lengths_query=lengths, actual_seq_lengths_key=lengths,
    )  # fmt: skip


@pytest.mark.parametrize("call", [dense, indexer])
def test_counts_that_decrease(call: Callable[[list[int]], None]) -> None:
    with pytest.raises(ValueError, match=f"never decrease, got 5 after 7 at 1{COUNTS}"):
        call([7, 5, 4])
    with pytest.raises(ValueError, match="never decrease, got 5 after 7 at 1 "):
        call([7, 5, 5])


def test_counts_where_the_device_refuses_padding_rows() -> None:
    mask = torch.zeros(3, 1, 4, 4, dtype=torch.bool)  # one for each sequence
    with pytest.raises(ValueError, match=rf"got 7 of T1 = 16 and 7 of T2 = 16{COUNTS}"):
        dense([4, 5, 7], atten_mask=mask, sparse_mode=1)
    with pytest.raises(ValueError, match=r"got 8 of T1 = 16 and 8 of T2 = 16; on the CPU"):
        dense([4, 5, 8], atten_mask=mask, sparse_mode=1)


@pytest.mark.parametrize(
    ("lengths", "warned"), [("[4, 5, 7]", 1), ("[4, 9, 16]", 0), ("[4, 5, 8]", 0), ("[9]", 0)]
)
@pytest.mark.parametrize("call", ["dense", "indexer"])
def test_counts_where_padding_rows_are_legal_warn_once(
    call: str, lengths: str, warned: int
) -> None:
    """In a process of its own: torch warns once in each."""
    script = (
        f"import ascend_attn_ops, test_pack_hints\n"
        f"if {call!r} == 'dense': ascend_attn_ops.set_limits(None)\n"
        f"for _ in range(3): test_pack_hints.{call}({lengths})\n"
    )
    result = fresh.run(script)
    assert result.status == 0, result.err
    assert result.err.count("these look like counts") == warned


def test_a_batch_where_a_pack_is_expected() -> None:
    query, latent = bfloat16(1, T, 8, 512), bfloat16(1, T, 1, 512)
    expected = r"expected rank 3 for layout TND, got shape .*; tensor.flatten\(0, 1\) makes a batch"
    with pytest.raises(ValueError, match=expected):
        ops.flash_attention_score(
            query, query, query, num_heads=8, layout="TND", actual_seq_lengths_query=[T],
            actual_seq_lengths_key=[T],
        )  # fmt: skip
    with pytest.raises(ValueError, match=expected):
        ops.sparse_flash_attention(
            query, latent, latent, torch.zeros(1, T, 1, 8).int(), scale_value=1.0, layout="TND",
            actual_seq_lengths_query=[T], actual_seq_lengths_key=[T],
        )  # fmt: skip


def test_how_to_move() -> None:
    with pytest.raises(ValueError, match=r"got meta; move it with \.to\(query\.device\)"):
        ops.lightning_indexer(
            bfloat16(1, T, 8, 128), bfloat16(1, T, 1, 128), bfloat16(1, T, 8).to("meta")
        )


def test_statistics_of_another_layout() -> None:
    x = bfloat16(1, T, N, D)
    out, *statistics = ops.flash_attention_score(x, x, x, num_heads=N, layout="BSND")
    packed = x[0]
    with pytest.raises(ValueError, match=r"softmax_max: .* of a forward in layout TND, got \[1, 4"):
        ops.flash_attention_score_grad(
            packed, packed, packed, out[0], *statistics, out[0], num_heads=N, layout="TND",
            actual_seq_lengths_query=[T], actual_seq_lengths_key=[T], scale_value=1.0,
        )  # fmt: skip
