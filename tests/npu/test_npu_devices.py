"""Calls that a device would refuse or compute wrong if they were launched as they come.

Run on every device of run.py. The simulation refuses and miscomputes what the device does
(docs/device.md), so that each of these fails without what its kernel does about it.
"""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
import torch_npu
from ascend_attn_check.samples import (
    flash_attention_score,
    kv_quant_sparse_flash_attention,
    lightning_indexer,
    prompt_flash_attention,
    sparse_flash_attention,
)
from ascend_attn_check.samples.flash_attention_score import FlashCase
from ascend_attn_check.samples.prompt_flash_attention import PromptCase
from ascend_attn_check.samples.sparse import SparseCase
from ascend_attn_ops._core.device_limits import device_in_force
from cann_simulator._products import missing_functions
from device_samples import first
from support.samples import Recipe, Sample
from support.simulated_npu import DEVICE, TASK_QUEUE, first_phases, run_in_new_process
from support.tolerance import assert_same_bits
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_limits", "no_leak")

PRODUCT, CANN = DEVICE
on_a2 = pytest.mark.skipif(PRODUCT != "A2", reason="a rule of A2 and A3")


def lacks(function: str) -> pytest.MarkDecorator:
    missing = missing_functions(PRODUCT, CANN)
    return pytest.mark.skipif(function in missing, reason=f"this device has no {function}")


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Makes new memory hold the simulation's fill, which nobody would take for a result."""
    torch.npu.synchronize()
    torch.npu.empty_cache()


def cpu(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.cpu() for x in outputs)


def test_the_versions_are_those_of_the_simulation() -> None:
    assert torch_npu.npu.utils.get_cann_version() == f"{CANN}.0"
    # On a thread of its own, whose limits nobody has lifted.
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(device_in_force).result() == DEVICE


def test_a_newer_version_says_whose_limits_apply() -> None:
    code = "from ascend_attn_ops._core import device_limits as x; print(x.device_in_force().cann)"
    out, err = run_in_new_process(code, CANN_SIM_VERSION="9.2")
    assert out.split() == ["9.1"]
    assert (
        err.count("UserWarning: ascend_attn_ops: CANN 9.2.0 is newer than all versions that") == 1
    )


def test_rows_of_a_fused_projection() -> None:
    """With gaps between them."""
    caches = [torch.zeros(2, 4, 2, 32).bfloat16() for _ in range(2)]
    slots = torch.tensor([6, 1, -1, 3, 0], dtype=torch.int32)
    _, key, value = torch.randn(5, 3, 2, 32).bfloat16().unbind(1)
    ops.scatter_pa_kv_cache_(key, caches[0], slots, value, caches[1])
    key, value = (x.npu()[:, i] for i, x in enumerate((torch.stack([key, value], 1),) * 2))
    assert not key.is_contiguous()
    on_npu = [torch.zeros_like(x).npu() for x in caches]
    with cann_simulator.recorded_calls() as log:
        ops.scatter_pa_kv_cache_(key, on_npu[0], slots.npu(), value, on_npu[1])
    assert_same_bits(cpu(tuple(on_npu)), tuple(caches))
    (call,) = first_phases(log, "aclnnScatterPaKvCache")
    rows = 128 if PRODUCT == "950" else 64
    assert [call[name]["strides"] for name in ("key", "value")] == [[rows, 32, 1]] * 2


@pytest.mark.skipif(
    PRODUCT != "950" and TASK_QUEUE == 2, reason="the refusal on the queue's thread ends the queue"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int16, torch.int32], ids=str)
def test_dtypes_of_caches(dtype: torch.dtype) -> None:
    """The simulated device takes the dtypes that the limits accept."""
    rows = torch.arange(6).view(3, 1, 2).to(dtype)
    cache, slots = torch.zeros(1, 4, 1, 2, dtype=dtype), torch.tensor([3, -1, 0], dtype=torch.int32)
    x = {name: tensor.npu() for name, tensor in (("rows", rows), ("key", cache), ("value", cache))}
    arguments = (x["rows"], x["key"], slots.npu(), x["rows"], x["value"])
    if PRODUCT != "950":
        with pytest.raises(RuntimeError, match=r"key: dtype \w+ is not supported"):
            ops.scatter_pa_kv_cache_(*arguments)
        return
    ops.scatter_pa_kv_cache_(*arguments)
    for name in ("key", "value"):
        assert x[name].flatten().tolist() == [4, 5, 0, 0, 0, 0, 0, 1]


# Packs: rows behind the last sequence.

PACKS = [
    SparseCase(layout="TND", lengths=lengths, tail=tail, rope=8, absorbed=True)
    for lengths, tail in [
        (((3, 0, 6), (5, 2, 9)), (4, 3)), (((0, 0), (0, 0)), (3, 4)), (((7,), (8,)), (1, 0)),
    ]
]  # fmt: skip


# The kernel of keys in int8 writes out of bounds behind a length of BSND before CANN 9.1.
BEHIND_LENGTHS = [
    *(
        Recipe(x.OPERATORS[0], y)
        for x in (lightning_indexer, sparse_flash_attention)
        for y in PACKS
    ),
    *(x for x in kv_quant_sparse_flash_attention.OPERATORS[0].recipes if x.on_device),
]


@lacks("aclnnLightningIndexer")
@pytest.mark.parametrize("recipe", BEHIND_LENGTHS, ids=lambda x: x.id)
def test_rows_behind_a_length(recipe: Recipe) -> None:
    sample = recipe.make(torch.bfloat16)
    on_npu = sample.to("npu")
    before = cann_simulator.waits()
    outputs = on_npu.call(torch.ops.ascend)
    assert cann_simulator.waits() == before
    assert_same_bits(cpu(outputs), sample.call(torch.ops.ascend))


def test_the_mask_of_all_heads_of_one_padded_pack() -> None:
    query, key = torch.rand(6, 2, 16).half(), torch.rand(7, 2, 16).half()
    mask = torch.rand(1, 2, 4, 5) > 0.5

    def attend(device: str) -> tuple[Tensor, ...]:
        q, k, atten_mask = query.to(device), key.to(device), mask.to(device)
        lengths = {"actual_seq_lengths_query": [4], "actual_seq_lengths_key": [5]}
        return ops.flash_attention_score(
            q, k, k, num_heads=2, layout="TND", atten_mask=atten_mask, **lengths
        )

    assert_same_bits(cpu(attend("npu")), attend("cpu"))


# The gradient of lightning_indexer in packs.

# Lengths of queries and keys, and those of every launch: the sequences and their lengths.
UNEQUAL = {
    ((3, 6), (5, 9)): [(1, 3, 5), (1, 6, 9)], ((4, 4, 4), (5, 5, 5)): [(3, 4, 5)],
    ((4, 4, 4), (5, 5, 7)): [(2, 4, 5), (1, 4, 7)],
    ((4, 4, 3, 4), (4, 4, 4, 4)): [(2, 4, 4), (1, 3, 4), (1, 4, 4)],
    ((3, 0, 6, 0), (5, 2, 9, 0)): [(1, 3, 5), (1, 6, 9)], ((4, 0, 4), (4, 0, 4)): [(2, 4, 4)],
    ((4, 0, 4), (4, 2, 4)): [(1, 4, 4), (1, 4, 4)], ((0, 5, 3), (3, 0, 0)): [],
    ((7,), (9,)): [(1, 7, 9)],
}  # fmt: skip


def packed_gradient(lengths: Any, tail: tuple[int, int] = (2, 3)) -> Sample:
    case = SparseCase(layout="TND", lengths=lengths, tail=tail, k=6, mode=0 if tail[0] else 3)
    return lightning_indexer.build_grad(case, torch.bfloat16)


@pytest.mark.usefixtures("unchecked")  # the shortest sequences have fewer keys than slots
@lacks("aclnnLightningIndexerGrad")
@pytest.mark.parametrize("lengths", UNEQUAL, ids=str)
@pytest.mark.parametrize("tail", [(0, 0), (2, 3)], ids=str)
def test_no_launch_has_sequences_of_unequal_lengths(lengths: Any, tail: tuple[int, int]) -> None:
    sample = packed_gradient(lengths, tail)
    expected = sample.call(torch.ops.ascend)
    on_npu = sample.to("npu")
    with cann_simulator.recorded_calls() as log:
        outputs = on_npu.call(torch.ops.ascend)
    assert_same_bits(cpu(outputs), expected)
    calls = first_phases(log, "aclnnLightningIndexerGrad")
    launches = UNEQUAL[lengths]
    assert [call["actualSeqQLenOptional"]["sizes"] for call in calls] == [[n] for n, *_ in launches]
    if len(launches) == 1:
        # The caller's own tensors, or views of them without the tail.
        return
    for name, side in (("query", 1), ("dqOut", 1), ("dweightsOut", 1), ("key", 2), ("dkOut", 2)):
        given = [call[name]["sizes"][0] for call in calls]
        assert given == [launch[0] * launch[side] for launch in launches], name
    # Views: no tensor of the caller's is copied.
    for name, tensor in (("query", on_npu.inputs["query"]), ("dqOut", outputs[0])):
        assert {call[name]["address"] for call in calls} <= {tensor.untyped_storage().data_ptr()}


# Values of 128 beside keys of 192.


@lacks("aclnnFlashAttentionScoreGradV2")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("layout", "b", "n", "refused"),
    [
        ("SBH", 1, 256, True), ("SBH", 2, 128, True), ("SBH", 1, 255, False),
        ("BSH", 1, 256, True), ("BSH", 2, 128, False), ("BSND", 1, 256, True),
        ("BNSD", 1, 256, False),
    ],
)  # fmt: skip
def test_long_rows_are_launched_in_bnsd(
    layout: str, b: int, n: int, refused: bool, deterministic: bool, set_determinism: Any
) -> None:
    def tensor(s: int, d: int) -> torch.Tensor:
        axes = {"B": b, "S": s, "N": n, "D": d, "H": n * d}
        generator = torch.Generator().manual_seed(d)
        return torch.randn([axes[x] for x in layout], generator=generator).bfloat16()

    def gradients(device: str) -> tuple[torch.Tensor, ...]:
        query, key, value = (x.to(device) for x in (tensor(2, 192), tensor(3, 192), tensor(3, 128)))
        options: dict[str, Any] = {"num_heads": n, "layout": layout, "scale_value": 0.1}
        out, *statistics = torch.ops.ascend.flash_attention_score(query, key, value, **options)
        return tuple(
            torch.ops.ascend.flash_attention_score_grad(
                query, key, value, out, *statistics, out, **options
            )
        )

    expected = gradients("cpu")
    set_determinism(deterministic)
    with cann_simulator.recorded_calls() as log:
        actual = gradients("npu")
    assert_same_bits(cpu(actual), expected)
    (call,) = first_phases(log, "aclnnFlashAttentionScoreGradV2")
    moved = refused and not deterministic and DEVICE[0] in ("A2", "A3")
    assert call["inputLayout"] == ("BNSD" if moved else layout)


# Determinism.


def deterministic_sample(operator: str) -> Sample:
    return first(operator).make(torch.bfloat16).given(deterministic=True).to("npu")


@lacks("aclnnSparseFlashAttentionGrad")
@pytest.mark.parametrize(
    ("operator", "function"),
    [
        ("sparse_flash_attention_grad", "aclnnSparseFlashAttentionGrad"),
        ("sparse_lightning_indexer_grad_kl_loss", "aclnnSparseLightningIndexerGradKLLoss"),
    ],
)
def test_the_argument_reaches_the_context(operator: str, function: str) -> None:
    sample = deterministic_sample(operator)
    with cann_simulator.computing(False), cann_simulator.recorded_calls() as log:
        for deterministic in (True, False, True):
            sample.replace(deterministic=deterministic).call(torch.ops.ascend)
            # torch_npu's own calls are none of it.
            torch_npu.npu_swiglu(sample.inputs["query"])
    calls = first_phases(log, function)
    assert [(call["deterministic"], call["context"]) for call in calls] == [
        (True, 1), (False, 0), (True, 1),
    ]  # fmt: skip
    assert {call["context"] for call in first_phases(log, "aclnnSwiGlu")} == {0}


@lacks("aclnnSparseFlashAttentionGrad")
def test_threads_do_not_disturb_each_other() -> None:
    sample = deterministic_sample("sparse_flash_attention_grad")

    def work(deterministic: bool) -> None:
        own = sample.replace(deterministic=deterministic)
        with ops.limits(None):
            for _ in range(300):
                own.call(torch.ops.ascend)

    with cann_simulator.computing(False), ThreadPoolExecutor(4) as pool:
        # torch_npu sets the context itself in the first call of a thread.
        list(pool.map(work, [False] * 8))
        with cann_simulator.recorded_calls() as log:
            list(pool.map(work, [True, False] * 2))
    calls = first_phases(log, "aclnnSparseFlashAttentionGrad")
    assert len(calls) == 1200
    assert all(call["deterministic"] == bool(call["context"]) for call in calls)


# FlashAttention: padded packs.


@pytest.mark.parametrize("tail", [(2, 3), (2, 0), (0, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("lengths", [((3, 0, 6, 4), (5, 2, 9, 4)), ((0,), (0,))], ids=str)
def test_padded_packs(lengths: Any, tail: tuple[int, int]) -> None:
    case = FlashCase(layout="TND", lengths=lengths, tail=tail, mode=3)
    if not (sum(lengths[0]) + tail[0] and sum(lengths[1]) + tail[1]):
        pytest.skip("no tokens: nothing is padded")
    end = [0] if all(tail) and PRODUCT != "950" and CANN >= "9.0" and sum(lengths[0]) else []
    for build in (flash_attention_score.build, flash_attention_score.build_grad):
        sample = build(case, torch.bfloat16)
        with cann_simulator.recorded_calls() as log:
            outputs = sample.to("npu").call(torch.ops.ascend)
        assert_same_bits(cpu(outputs), sample.call(torch.ops.ascend))
        (call,) = [x["arguments"] for x in log if "actualSeqQLenOptional" in x.get("arguments", ())]
        assert call["actualSeqQLenOptional"] == [*accumulate(lengths[0]), *end]
        assert call["actualSeqKvLenOptional"] == [*accumulate(lengths[1]), *end]


# PromptFlashAttention, which Ascend 950 lacks: its launch is FusedInferAttentionScore V5.

PROMPT_FUNCTION = (
    "aclnnFusedInferAttentionScoreV5" if PRODUCT == "950" else "aclnnPromptFlashAttentionV3"
)
PROMPT_CASES = [x for x in prompt_flash_attention.CASES if x.inputs == "float"]
ONE_QUERY = PromptCase(b=3, s=(1, 9), heads=(4, 2), d=16)
ONE_QUERY_CASES = [
    ONE_QUERY, replace(ONE_QUERY, lengths=((1, 0, 1), (9, 4, 0)), layout="BSH"),
    replace(ONE_QUERY, mode=2, lengths=(None, (9, 4, 0))),
    replace(ONE_QUERY, mode=3, lengths=((1, 0, 1), (9, 4, 5)), layout="BSND"),
    replace(ONE_QUERY, mode=4, pre=8, next=-3, lengths=(None, (9, 4, 6))),
    replace(ONE_QUERY, mode=4, pre=4, next=0, lengths=((1, 1, 0), (9, 4, 6))),
    replace(ONE_QUERY, mask="BS", pre=-2, next=5),
    replace(ONE_QUERY, mask="B1S", larger=(2, 3), next=4, pre=0),
    replace(ONE_QUERY, mask="S", next=0, layout="BNSD_BSND"),
    replace(ONE_QUERY, mask="1S", mode=1, lengths=((0, 1, 1), None)),
    replace(ONE_QUERY, mode=4, pre=8, next=0, output="int8", d=32),
]  # fmt: skip


@pytest.mark.parametrize("case", [*PROMPT_CASES, *ONE_QUERY_CASES], ids=lambda case: case.id)
def test_prompts(case: PromptCase) -> None:
    sample = prompt_flash_attention.build(case, torch.float16)
    expected = sample.call(torch.ops.ascend)
    with cann_simulator.recorded_calls() as log:
        actual = sample.to("npu").call(torch.ops.ascend)
    assert_same_bits(cpu(actual), expected)
    calls = first_phases(log, PROMPT_FUNCTION)
    assert [x["innerPrecise"] for x in calls] == [2] * bool(expected[0].numel())


@lacks("aclnnSparseFlashAttentionGrad")
@pytest.mark.parametrize("value", [1, 0], ids=["switched on", "put back"])
def test_a_context_that_keeps_its_parameter_is_an_error(tmp_path: Path, value: int) -> None:
    """Else a call would be deterministic, or not, against what was asked for."""
    source, shim = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text("""
        long refused_value = -1;
        int aclrtCtxSetSysParamOpt(int option, long value) {
          return value == refused_value ? 107000 : 0;
        }
    """)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, source], check=True)
    # Loaded before CANN, the shim's function is found first.
    output, _ = run_in_new_process(f"""
        import ctypes
        refused = ctypes.c_long.in_dll(ctypes.CDLL("{shim}", ctypes.RTLD_GLOBAL), "refused_value")
        import cann_simulator, torch, torch_npu, ascend_attn_ops as ops
        from device_samples import first
        sample = first("sparse_flash_attention_grad").make(torch.bfloat16)
        sample = sample.given(deterministic=True).to("npu")
        before = cann_simulator.live_handles()
        refused.value = {value}
        try:
            with ops.limits(None):
                sample.call(torch.ops.ascend)
            torch.npu.synchronize()
        except RuntimeError as error:
            print(str(error).replace(chr(10), " "))
        print(cann_simulator.live_handles() == before)
    """)
    assert "aclrtCtxSetSysParamOpt" in output or TASK_QUEUE == 2
    assert re.search("107000|aclnnSparseFlashAttentionGrad", output), output
    assert output.split()[-1] == "True"
