"""Packs of more sequences than one launch takes, which the launch divides.

Run on every device of run.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ascend_attn_ops
import cann_simulator
import pytest
import torch
from ascend_attn_ops.check.gradients import differentiable_names, outputs_and_gradients
from ascend_attn_ops.check.samples.flash_attention_score import FlashCase, build
from ascend_attn_ops.masks import compressed_mask
from support.simulated_npu import DEVICE
from support.tolerance import TOLERANCES, assert_close, assert_same_bits

pytestmark = [pytest.mark.usefixtures("no_limits"), pytest.mark.usefixtures("unchecked")]

PRODUCT, CANN = DEVICE
MOST, MOST_WITH_PREFIX = 2048, 1000
# The device wants a 0 behind the lengths of a padded pack.
CLOSES = PRODUCT != "950" and CANN >= "9.0"
HALF, FLOAT = torch.float16, torch.float32
Lengths = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class LongPack(FlashCase):
    layout: str = "TND"
    name: str = ""

    @property
    def id(self) -> str:
        """Without the lengths."""
        return self.name


def lengths(count: int, queries: int = 2, keys: int = 3) -> Lengths:
    """Some sequences are empty, and some have queries or keys alone."""
    draw = random.Random(count)
    pairs = [(draw.randint(0, queries), draw.randint(0, keys)) for _ in range(count)]
    return tuple(x for x, _ in pairs), tuple(x for _, x in pairs)


def no_scores(count: int) -> Lengths:
    """A sequence has either queries or keys."""
    return tuple(i % 2 for i in range(count)), tuple(2 * (i % 2 == 0) for i in range(count))


def together(*packs: Lengths) -> Lengths:
    queries, keys = zip(*packs, strict=True)
    return sum(queries, ()), sum(keys, ())


PACK = LongPack(lengths=lengths(4500), heads=(2, 1), d=(16, 16))
EMPTY = no_scores(2 * MOST)
ONE = ((3,), (4,))
PREFIXED = lengths(2300)
FEW_KEYS = together(EMPTY, ((2, 0), (1, 1)), no_scores(MOST))  # 2 scores of 2 keys

CASES = [
    replace(PACK, name="plain"),
    replace(PACK, name="padded", tail=(3, 2), mode=3),
    replace(PACK, name="padded queries", tail=(3, 0), mode=2),
    replace(PACK, name="closed", tail=(3, 2), closed=True, mode=3),
    replace(PACK, name="full", lengths=lengths(MOST + 1), tail=(1, 1)),
    replace(PACK, name="full, with the closing 0", lengths=lengths(MOST), tail=(1, 1)),
    replace(PACK, name="closing 0 alone", lengths=lengths(MOST), tail=(4, 5), closed=True),
    replace(PACK, name="parts without scores", lengths=together(ONE, EMPTY, ONE, EMPTY, ONE)),
    replace(PACK, name="no scores at the end", lengths=together(ONE, EMPTY), tail=(2, 1)),
    replace(PACK, name="no scores", lengths=EMPTY, tail=(2, 1)),
    replace(PACK, name="band", mode=4, pre=3, next=0, lengths=lengths(4500, 3, 3)),
    replace(PACK, name="prefix", mode=6, lengths=PREFIXED, prefix=PREFIXED[1]),
    replace(PACK, name="padded prefix", mode=6, lengths=PREFIXED, prefix=PREFIXED[1], tail=(1, 2)),
    replace(PACK, name="band at the end", mode=7, pre=5, next=-1,
            lengths=together(lengths(4500), ONE)),
    replace(PACK, name="band before empty ones", mode=7, pre=5, next=-1,
            lengths=together(lengths(MOST), ONE, EMPTY)),
    replace(PACK, name="band at the start", mode=8, pre=5, next=0,
            lengths=together(ONE, lengths(4500))),
    replace(PACK, name="band behind empty ones", mode=8, pre=5, next=0,
            lengths=together(EMPTY, ONE, lengths(MOST))),
    replace(PACK, name="one mask", mode=1, mask=""),
    replace(PACK, name="one mask of four axes", mode=0, mask="11", pre=2, next=1),
    replace(PACK, name="mask of each", mode=0, mask="B1", pre=1, next=1),
    replace(PACK, name="mask of each and head", mode=1, mask="BN", lengths=lengths(2 * MOST + 1)),
    replace(PACK, name="mask of two in the end", mode=1, mask="BN", heads=(3, 3), tail=(2, 1),
            lengths=together(lengths(2 * MOST), ONE), closed=True),
    replace(PACK, name="mask of all tokens", mode=0, mask="sum", pre=1, next=2,
            lengths=lengths(2200, 1, 1)),
    replace(PACK, name="bias of scores", pse="full", mode=3),
    replace(PACK, name="bias of keys", pse="keys", pse_type=0, tail=(1, 1)),
    replace(PACK, name="bias of keys, as many as scores", pse="keys", lengths=FEW_KEYS),
    replace(PACK, name="slopes", pse="N", pse_type=2, start=(2, 1)),
    replace(PACK, name="slopes of each", pse="BN", pse_type=3, mode=2, tail=(3, 2), closed=True),
    replace(PACK, name="dropout", keep_prob=0.6, heads=(8, 2)),
    replace(PACK, name="dropout, bits apart", keep_prob=0.6, heads=(3, 1), mode=3, tail=(2, 1)),
    # No part but the first begins on a byte.
    replace(PACK, name="dropout, shifted bits", keep_prob=0.6, heads=(1, 1),
            lengths=together(((3,), (1,)), ((2,) * 5000, (4,) * 5000))),
    replace(PACK, name="sink", sink=True, mode=3, tail=(2, 1)),
    replace(PACK, name="ropes", rope=16, mode=3),
    replace(PACK, name="wide ropes", rope=24, mode=3, tail=(2, 1)),
    replace(PACK, name="sink and ropes", sink=True, rope=16, mode=4, pre=5, next=1,
            lengths=lengths(4500, 3, 3)),
]  # fmt: skip


def launched(call: Callable[[], Any]) -> tuple[Any, list[dict[str, Any]]]:
    """The result of a call, and the arguments of the packs that it launches."""
    with cann_simulator.recorded_calls() as log:
        result = call()
    first = [x["arguments"] for x in log if x.get("phase") == 1]
    return result, [x for x in first if "actualSeqQLenOptional" in x]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_parts_equal_the_whole_on_the_cpu(case: LongPack) -> None:
    sample = build(case, HALF)
    (outputs, gradients), calls = launched(lambda: outputs_and_gradients(sample.to("npu")))
    expected, expected_gradients = outputs_and_gradients(sample)
    names = differentiable_names(sample)
    assert_same_bits(tuple(x.cpu() for x in outputs), expected)
    for name, x, y in zip(names, gradients, expected_gradients, strict=True):
        if name == "sink":  # the sum of the parts' sums
            assert_close(name, x.cpu(), y, TOLERANCES[FLOAT])
        else:
            assert_same_bits((x.cpu(),), (y,))
    most = MOST_WITH_PREFIX if case.mode == 6 else MOST
    for call in calls:
        ends, key_ends = (call[f"actualSeq{x}LenOptional"] for x in ("Q", "Kv"))
        assert len(ends) == len(key_ends) <= most
        assert any(ends)
        assert any(key_ends)
    assert calls or not any(a and b for a, b in case.sequences)


@pytest.mark.parametrize("batches", [1, 2 * MOST + 2])
def test_parts_with_a_bias_of_1024_rows(batches: int) -> None:
    case = replace(PACK, name="rows", mode=3, heads=(1, 1), d=(4, 4), pse="keys",
                   lengths=together(((1030,), (1030,)), EMPTY, ((1030,), (1030,))))  # fmt: skip
    shared = build(case, HALF).replace(pse_shift=torch.randn(1, 1, 1024, 1030).half())
    sample, on_npu = (
        x.replace(pse_shift=x.options["pse_shift"].expand(batches, -1, -1, -1))
        for x in (shared, shared.to("npu"))
    )
    outputs = on_npu.call(torch.ops.ascend)
    assert_same_bits(tuple(x.cpu() for x in outputs), sample.call(torch.ops.ascend))


@pytest.mark.parametrize("padding", [0, 1])
def test_the_lengths_of_each_launch(padding: int) -> None:
    """The last part alone has the padding rows, and the 0 that closes them."""
    count = 2 * MOST - padding  # of a token
    x = torch.ones(count + padding, 1, 16, dtype=HALF, device="npu", requires_grad=True)
    ends = list(range(1, count + 1))

    def attend() -> None:
        out = ascend_attn_ops.flash_attention_score(
            x, x, x, num_heads=1, layout="TND", actual_seq_lengths_query=ends,
            actual_seq_lengths_key=ends,
        )[0]  # fmt: skip
        out.backward(torch.ones_like(out))

    _, calls = launched(attend)
    of_first = list(range(1, MOST + 1))
    of_last = list(range(1, count - MOST + 1))
    if padding and CLOSES:
        of_last.append(0)
    parts = [of_first, of_last]
    for name in ("actualSeqQLenOptional", "actualSeqKvLenOptional"):
        assert [call[name] for call in calls] == parts * 2
    assert [call["query"]["sizes"][0] for call in calls] == [MOST, MOST] * 2


def relaunched(ends: list[int], tokens: int, **options: Any) -> None:
    """As the update of a graph launches a call."""
    x = torch.ones(tokens, 1, 16, dtype=HALF, device="npu")
    statistics = [torch.ones(tokens, 1, 8, device="npu") for _ in range(2)]
    lengths = torch.tensor(ends)
    workspace = torch.empty(0, dtype=torch.uint8, device="npu")
    torch.ops.ascend.flash_attention_score.relaunch(
        x, x, x, num_heads=1, layout="TND", scale_value=1.0, actual_seq_lengths_query=lengths,
        actual_seq_lengths_key=lengths, workspace=workspace, out=[x.clone(), *statistics],
        **options,
    )  # fmt: skip


def test_a_graph_cannot_update_a_divided_pack() -> None:
    words = (
        "^ascend::flash_attention_score: actual_seq_lengths_query: expected at most 2048 lengths "
        "in a graph's call, whose lengths a replay may change, got 20001 "
    )
    with pytest.raises(NotImplementedError, match=words):
        relaunched(list(range(1, 20002)), 20001)
    relaunched(list(range(1, MOST + 1)), MOST)
    if CLOSES:
        with pytest.raises(NotImplementedError, match=r"at most 2048 lengths .*, got 2049 "):
            relaunched(list(range(1, MOST + 1)), MOST + 1)
    prefix = {
        "prefix": torch.ones(MOST_WITH_PREFIX + 1, dtype=torch.int64), "sparse_mode": 6,
        "atten_mask": compressed_mask(6, torch.device("npu")),
    }  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"at most 1000 lengths .*, got 1001 "):
        relaunched(list(range(1, MOST_WITH_PREFIX + 2)), MOST_WITH_PREFIX + 1, **prefix)
