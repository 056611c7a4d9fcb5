"""Packs of more sequences than the host code of A2 and A3 has room for."""

from __future__ import annotations

import ascend_attn_ops
import pytest
import torch
from conftest import DEVICE

MOST = 20000


def attend(sequences: int, padding: int = 0) -> torch.Tensor:
    x = torch.ones(sequences + padding, 1, 16, dtype=torch.float16, device="npu")
    ends = list(range(1, sequences + 1))
    return ascend_attn_ops.flash_attention_score(
        x, x, x, num_heads=1, layout="TND", actual_seq_lengths_query=ends,
        actual_seq_lengths_key=ends,
    )[0]  # fmt: skip


@pytest.mark.skipif(DEVICE[0] == "950", reason="its host code has room for any number")
def test_more_lengths_than_the_host_code_holds() -> None:
    words = (
        "^ascend::flash_attention_score: actual_seq_lengths_query: expected at most 20000 lengths "
        "on Ascend A2 and A3, with the 0 that closes a padded pack, got 20001; divide the pack"
    )
    with pytest.raises(NotImplementedError, match=words):
        attend(MOST + 1)
    if DEVICE[1] != "8.5":
        # The launch closes a padded pack with a 0, which is one length more.
        with ascend_attn_ops.limits(None), pytest.raises(NotImplementedError, match=words):
            attend(MOST, padding=1)


def test_the_largest_pack() -> None:
    assert (attend(MOST).cpu() == 1).all()
