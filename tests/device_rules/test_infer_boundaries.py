"""Calls of fused_infer_attention_score that Ascend 950 accepts and A2 refuses, by CANN's checks."""

from __future__ import annotations

from dataclasses import replace

import ascend_attn_ops
import pytest
import torch
from ascend_attn_ops.check.boundaries.infer import (
    ABSORBED,
    ABSORBED_PACK,
    PACK,
    PAGED,
    PAGED_PACK,
    PLAIN,
    call,
)

UNPAGED = replace(ABSORBED, pages="", s=(2, 20), lengths=(None, None))
# Accepted since CANN 9.0, each with the beginning of A2's error.
ACCEPTED = {
    "many heads": (call(PLAIN, heads=(257, 1)), "query: expected N "),
    "D of 127": (call(PLAIN, d=127), "query: expected D "),
    "D of 272 in a pack": (call(PACK, d=272), "query: expected D of at most 256"),
    "smaller values": (call(PLAIN, d=128, dv=64, mode=2), "value: expected query's D "),
    "larger values in a pack": (call(PACK, d=80, dv=96), "value: expected query's D "),
    "left-up causal packs": (call(PACK, mode=2), "sparse_mode: expected 0, 3 or 4 in packed"),
    "bands of packs": (call(PACK, mode=4, pre=-4, next=9), "pre_tokens, next_tokens: "),
    "fast packs": (call(PACK, heads=(4, 2), inner_precise=1), "inner_precise: expected 0 in "),
    "fractals": (call(PAGED, pages="fractals", d=96, block_size=128), "key: expected D of 64 or"),
    "absorbed without pages": (call(UNPAGED), "block_table: expected a tensor"),
    "absorbed packs with statistics": (call(ABSORBED_PACK, lse=True), "return_softmax_lse: "),
}
# The same since CANN 9.1.
ACCEPTED_BY_9_1 = {
    "192 and 128 in pages": (call(PAGED, d=192, dv=128, block_size=16), "value: expected key's"),
    "192 and 128 in pages of a pack": (call(PAGED_PACK, d=192, dv=128), "value: expected key's"),
    "many absorbed queries": (call(ABSORBED, s=(17, 0)), ""),
    "counts of absorbed queries": (call(ABSORBED, lengths=((1, 2), (20, 7))), ""),
}


@pytest.mark.parametrize("name", [*ACCEPTED, *ACCEPTED_BY_9_1])
def test_950_accepts(name: str) -> None:
    arguments, error_of_a2 = (ACCEPTED | ACCEPTED_BY_9_1)[name]
    for cann in ("9.0", "9.1"):
        with ascend_attn_ops.limits("950", cann):
            if cann == "9.0" and name in ACCEPTED_BY_9_1:
                with pytest.raises(ValueError, match="on Ascend 950 with CANN 9"):
                    torch.ops.ascend.fused_infer_attention_score(**arguments())
            else:
                torch.ops.ascend.fused_infer_attention_score(**arguments())
    with ascend_attn_ops.limits("A2", "9.1"):
        if error_of_a2:
            with pytest.raises(ValueError, match=f"fused_infer_attention_score: {error_of_a2}"):
                torch.ops.ascend.fused_infer_attention_score(**arguments())
        else:
            torch.ops.ascend.fused_infer_attention_score(**arguments())
