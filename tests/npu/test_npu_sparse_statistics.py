"""Statistics of sparse attention on the NPU: with paged keys, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
from ascend_attn_check.gradients import differentiable_names
from ascend_attn_check.samples.sparse import SparseCase
from ascend_attn_check.samples.sparse_flash_attention import SPARSE_FLASH_ATTENTION
from ascend_attn_check.samples.sparse_flash_mla import DEVICE, SPARSE_FLASH_MLA, MlaCase
from support.samples import Sample
from support.simulated_npu import captured, first_phases
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits")

FUNCTION = "aclnnSparseFlashAttention"
# Three tokens of a batch select 12 keys, of the 96 that its blocks hold.
SELECTED = SparseCase(
    b=2, s=(3, 90), lengths=((3, 2), (90, 33)), k=4, page=16, rope=8, statistics=True,
    absorbed=True,
)  # fmt: skip
PACKED = replace(
    SELECTED, layout="TND", lengths=((5, 0, 2), (90, 3, 60)), tail=(2, 0), pattern="first"
)
# Nine tokens select up to 144 keys, of the 32.
WHOLE = replace(SELECTED, s=(9, 17), lengths=((9, 7), (17, 9)), k=16)
PACKED_WHOLE = replace(WHOLE, layout="TND", lengths=((9, 0, 7), (17, 3, 9)), tail=(2, 0))
CASES = [SELECTED, PACKED, WHOLE, PACKED_WHOLE, replace(SELECTED, block=8), replace(PACKED, rope=0)]


def made(case: SparseCase | MlaCase, dtype: torch.dtype = torch.bfloat16) -> Sample:
    operator = SPARSE_FLASH_MLA if isinstance(case, MlaCase) else SPARSE_FLASH_ATTENTION
    return operator.make(case, dtype)


def launches(sample: Sample) -> list[dict[str, Any]]:
    """The arguments of the calls of CANN's function."""
    with cann_simulator.computing(False), cann_simulator.recorded_calls() as log:
        sample.call(torch.ops.ascend)
        torch.npu.synchronize()
    return first_phases(log, FUNCTION)


def sizes(argument: dict[str, Any]) -> list[int]:
    found: list[int] = argument["sizes"]
    return found


@pytest.mark.parametrize("case", [SELECTED, PACKED], ids=lambda case: case.id)
def test_every_token_is_a_batch_of_its_keys(case: SparseCase) -> None:
    sample = made(case)
    tokens = sample.inputs["sparse_indices"].numel() // case.k
    (call,) = launches(sample.to("npu"))
    assert sizes(call["query"]) == [tokens, 1, case.heads, case.d]
    assert sizes(call["key"]) == [tokens, case.k, 1, case.d]
    assert sizes(call["keyRopeOptional"]) == [tokens, case.k, 1, case.rope]
    assert call["value"]["address"] == call["key"]["address"]
    assert (call["layoutQueryOptional"], call["layoutKvOptional"]) == ("BSND", "BSND")
    assert (call["sparseMode"], call["sparseBlockSize"]) == (0, 1)
    assert call["blockTableOptional"] is None


def test_whole_sequences_are_gathered_if_they_are_fewer_keys() -> None:
    (call,) = launches(made(WHOLE).to("npu"))
    assert sizes(call["key"]) == [2, 48, 1, WHOLE.d]
    assert (call["layoutKvOptional"], call["sparseMode"]) == ("BSND", 3)
    (call,) = launches(made(PACKED_WHOLE).to("npu"))
    assert sizes(call["key"]) == [3 * 48, 1, WHOLE.d]
    assert (call["layoutKvOptional"], call["sparseMode"]) == ("TND", 3)


def assert_like_the_cpu(sample: Sample) -> tuple[Tensor, ...]:
    found = tuple(x.cpu() for x in sample.to("npu").call(torch.ops.ascend))
    assert_same_bits(found, sample.call(torch.ops.ascend))
    return found


def test_rows_of_padding_are_zero() -> None:
    sample = made(SELECTED)
    indices = sample.inputs["sparse_indices"].clone()
    indices[1, 2:] = 0
    found = assert_like_the_cpu(sample.replace(sparse_indices=indices))
    assert not found[0][1, 2:].any()


@pytest.mark.parametrize("case", [SELECTED, WHOLE, PACKED_WHOLE], ids=lambda case: case.id)
def test_rows_that_select_nothing_are_zero(case: SparseCase) -> None:
    """The kernel gives them other statistics."""
    sample = made(case)
    indices = sample.inputs["sparse_indices"].clone()
    indices.flatten(0, -2)[::3] = -1
    assert_like_the_cpu(sample.replace(sparse_indices=indices))


@captured
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_replays_read_new_pages_and_lengths(case: SparseCase) -> None:
    """The capture would fail if the launch waited for the device."""
    original = made(case)
    sample = original.to("npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        outputs = sample.call(torch.ops.ascend)
    shorter = original.replace(
        actual_seq_lengths_key=original.options["actual_seq_lengths_key"] - 2,
        query=original.inputs["query"] * 0.5,
    )
    if case.block > 1 or case.pattern == "first":
        shorter = original.replace(query=original.inputs["query"] * 0.5)
    # Indices behind the shorter lengths would be errors on the CPU.
    indices = shorter.inputs["sparse_indices"]
    shorter = shorter.replace(sparse_indices=torch.where(indices < 0, -1, indices // 64))
    for contents in (original, shorter):
        for name, x in sample.tensors.items():
            x.copy_(contents.tensors[name])
        for x in outputs:
            x.fill_(torch.nan)
        graph.replay()
        torch.npu.synchronize()
        expected = contents.call(torch.ops.ascend)
        assert_same_bits(tuple(x.cpu() for x in outputs), expected)


def test_more_than_256_megabytes_are_gathered_in_parts() -> None:
    """120 tokens select 2048 keys of 1152 bytes: 113 fit."""
    tokens, count, page = 120, 2048, 16
    blocks = tokens * count // page + 1  # more keys than are selected

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="npu")

    def call() -> tuple[Tensor, ...]:
        return torch.ops.ascend.sparse_flash_attention(
            zeros(tokens, 1, 512), cache, cache, zeros(tokens, 1, count, dtype=torch.int32),
            scale_value=0.1, query_rope=zeros(tokens, 1, 64), key_rope=zeros(4, page, 1, 64),
            layout="TND", actual_seq_lengths_query=zeros(1, dtype=torch.int32) + tokens,
            actual_seq_lengths_key=zeros(1, dtype=torch.int32) + page * blocks,
            layout_kv="PA_BSND", block_table=zeros(1, blocks, dtype=torch.int32),
        )  # fmt: skip

    cache = zeros(4, page, 1, 512)
    with cann_simulator.computing(False), cann_simulator.recorded_calls() as log:
        torch.npu.reset_peak_memory_stats()
        before = torch.npu.memory_allocated()
        call()
        torch.npu.synchronize()
    keys = [call["key"]["sizes"] for call in first_phases(log, FUNCTION)]
    assert keys == [[113, count, 1, 512], [7, count, 1, 512]]
    # The index arithmetic takes a part of it more.
    assert torch.npu.max_memory_allocated() - before < 1.3 * 2**28


def test_no_keys_and_no_selection() -> None:
    sample = made(SELECTED)
    empty = {
        "no slots": {"sparse_indices": sample.inputs["sparse_indices"][..., :0]},
        "no blocks": {
            "block_table": sample.options["block_table"][:, :0],
            "actual_seq_lengths_key": torch.zeros(2, dtype=torch.int32),
            "sparse_indices": torch.full_like(sample.inputs["sparse_indices"], -1),
        },
    }
    for change in empty.values():
        found = assert_like_the_cpu(sample.replace(**change))
        assert all(bool((x == 0).all()) for x in found)


# Gradients, and their launches.

ATTENTION = SparseCase(s=(3, 5), heads=8, d=512, rope=64, k=1024, absorbed=True)
PACK = replace(DEVICE, layout="TND", lengths=((20, 9), (20, 9), (5, 2)))
TRAINED = [
    ATTENTION,
    replace(ATTENTION, b=3, s=(6, 9), lengths=((6, 3, 4), (9, 5, 4))),
    DEVICE,
    PACK,
    # The first rows have no keys.
    replace(DEVICE, kind="swa", ratio=1, s=(20, 18, 0)),
]


def of_out(out: Tensor, *_: Tensor) -> Tensor:
    return out.double().square().sum()


def of_lse(_: Tensor, *statistics: Tensor) -> Tensor:
    lse = statistics[0] if len(statistics) == 1 else ops.log_sum_exp(*statistics)
    return lse[lse.isfinite()].square().sum()


def of_both(*outputs: Tensor) -> Tensor:
    return of_out(*outputs) + of_lse(*outputs)


def gradients(sample: Sample, loss: Callable[..., Tensor]) -> Any:
    names = differentiable_names(sample)
    leaf = sample.requires_grad(names)
    return torch.autograd.grad(
        loss(*leaf.call(torch.ops.ascend)), [leaf.tensors[name] for name in names]
    )


@pytest.mark.parametrize(("loss", "launches"), [(of_out, 1), (of_lse, 1), (of_both, 2)])
@pytest.mark.parametrize("case", TRAINED, ids=lambda case: case.id)
def test_gradients(case: SparseCase | MlaCase, loss: Callable[..., Tensor], launches: int) -> None:
    sample = made(case)
    with cann_simulator.recorded_calls() as log:
        actual = gradients(sample.to("npu"), loss)
    assert sum(x["function"].endswith("Grad") for x in log if x.get("phase") == 2) == launches
    for x, y in zip(actual, gradients(sample.double(), loss), strict=True):
        assert (x.cpu() - y).norm() < 0.03 * y.norm()


@pytest.mark.parametrize("case", [ATTENTION, DEVICE], ids=lambda case: case.id)
def test_float16_is_refused(case: SparseCase | MlaCase) -> None:
    sample = made(case, torch.float16).to("npu")
    with pytest.raises(NotImplementedError, match=r"_grad: d_softmax_\w+: expected bfloat16"):
        gradients(sample, of_lse)
