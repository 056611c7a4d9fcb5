"""Strict streams: what nothing orders is an error that names both, and what is ordered is none."""

from __future__ import annotations

import re
import textwrap

import cann_simulator
import pytest
from support import fresh
from support.simulated_npu import on_ranks, once

pytestmark = once

BEGIN = """
import ascend_attn_ops, torch, torch_npu
x = torch.ones(64, 64).npu()
side = torch.npu.Stream()
main = torch.npu.current_stream()
query = torch.ones(1, 8, 2, 16, dtype=torch.bfloat16).npu()

def attend(q):
    return ascend_attn_ops.flash_attention_score(q, q, q, num_heads=2, layout="BSND")[0]

def attended_on_side():
    q = query * 2
    side.wait_stream(main)
    with torch.npu.stream(side):
        return q, attend(q)

"""
END = """
torch.npu.synchronize()
print("done")
"""


def run(program: str, streams: str = "strict") -> fresh.Ended:
    environment = {"CANN_SIM_STREAMS": streams, "ASCEND_ATTN_OPS_LIMITS": "none"}
    return fresh.run(BEGIN + textwrap.dedent(program) + END, **environment)


# The two pieces of work that an error names, and how the second depends on the first.
MISTAKES = {
    "a stream does not wait": (
        """
        y = x * 2
        with torch.npu.stream(side):
            z = y + 1
        """,
        r"aten::add on stream \d+ reads memory that aten::mul on stream \d+ writes",
    ),
    "the first stream does not wait for the second": (
        """
        q, z = attended_on_side()
        z.sum()
        """,
        r"aten::sum on stream \d+ reads memory that aclnnFlashAttentionScoreV2 .* writes",
    ),
    "memory is used again without record_stream": (
        """
        q, z = attended_on_side()
        address = q.data_ptr()
        del q
        again = query * 3
        assert again.data_ptr() == address
        """,
        r"aten::mul on stream \d+ writes memory that aclnnFlashAttentionScoreV2 .* reads",
    ),
    "an operator of ours": (
        """
        q = query * 2
        with torch.npu.stream(side):
            attend(q)
        """,
        r"aclnnFlashAttentionScoreV2 on stream \d+ reads memory that aten::mul on stream",
    ),
    "a copy from the host": (
        """
        y = torch.empty_like(x)
        host = torch.ones(64, 64, pin_memory=True)
        with torch.npu.stream(side):
            y.copy_(host, non_blocking=True)
        y.sum()
        """,
        r"aten::sum on stream \d+ reads memory that a copy on stream \d+ writes",
    ),
}  # fmt: skip
ORDERED = {
    "wait_stream": """
        q, z = attended_on_side()
        main.wait_stream(side)
        z.sum().item()
        """,
    "an event": """
        q = query * 2
        event = torch.npu.Event()
        event.record()
        with torch.npu.stream(side):
            event.wait()
            z = attend(q)
            done = torch.npu.Event()
            done.record()
        done.synchronize()
        z.sum().item()
        """,
    "record_stream": """
        q, z = attended_on_side()
        q.record_stream(side)
        del q
        again = query * 3
        """,
    "synchronize": """
        y = x * 2
        torch.npu.synchronize()
        with torch.npu.stream(side):
            z = y + 1
        side.synchronize()
        z.sum().item()
        """,
    "what is copied to the host arrives when it has waited": """
        host = torch.empty(64, 64, pin_memory=True)
        host.copy_(x, non_blocking=True)
        early = host.clone()
        main.synchronize()
        assert not torch.equal(early, torch.ones(64, 64))
        assert torch.equal(host, torch.ones(64, 64))
        """,
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake: str) -> None:
    program, message = MISTAKES[mistake]
    strict = run(program)
    assert strict.status != 0
    assert "done" not in strict.out
    assert re.search(f"strict streams: {message}", strict.err), strict.err


@pytest.mark.parametrize("program", ORDERED)
def test_what_is_ordered(program: str) -> None:
    ran = run(ORDERED[program])
    assert ran.out == "done\n", ran.err


def test_only_strict_streams_are_checked() -> None:
    ran = run(MISTAKES["a stream does not wait"][0], streams="lenient")
    assert ran.out == "done\n", ran.err


def test_another_name() -> None:
    with pytest.raises(ValueError, match="streams: expected one of lenient, strict; got loose"):
        cann_simulator.environment(streams="loose")


def test_communication() -> None:
    """HCCL has a stream of its own, for which wait() makes the current one wait."""
    ended = on_ranks(
        2,
        """
        import os, torch_npu, torch.distributed as dist
        torch.npu.set_device(int(os.environ["RANK"]))
        dist.init_process_group("hccl")
        x = torch.ones(4).npu()
        dist.all_reduce(x, async_op=True).wait()
        assert (x + 1).sum().item() == 12
        work = dist.all_reduce(x, async_op=True)
        (x + 1).sum().item()
        """,
        CANN_SIM_STREAMS="strict",
    )
    for rank in ended:
        assert "memory that HcclAllReduce on stream" in rank.err
        assert "assert (x + 1)" not in rank.err
