"""scatter_pa_kv_cache_ on the NPU: the caches of the CPU, by the call that the document states."""

from __future__ import annotations

from typing import Any

import cann_simulator
import pytest
import torch
from ascend_attn_check.samples.scatter_pa_kv_cache import CASES, CacheCase, build
from ascend_attn_ops.reference.call import Sample
from device_samples import to_npu
from test_npu_conformance import attention_calls, comparable
from torch import Tensor

FUNCTION = "aclnnScatterPaKvCache"
DTYPES = [torch.float16, torch.bfloat16, torch.int8]


def caches(sample: Sample) -> list[Tensor]:
    found = [x for name, x in sample.tensors.items() if name.endswith("_cache")]
    return [x.cpu().view(torch.uint8) for x in found]


def copy_of_caches(sample: Sample) -> Sample:
    names = [name for name in sample.tensors if name.endswith("_cache")]
    return sample.replace(**{name: sample.tensors[name].clone() for name in names})


def strided(sample: Sample) -> Sample:
    """Every other element of a larger tensor, behind an offset."""
    names = [name for name in ("key", "value") if name in sample.tensors]
    return sample.replace(
        **{n: torch.stack((torch.zeros_like(x), x), -1)[..., 1]
           for n, x in sample.tensors.items() if n in names}
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("no_limits", "no_leak")
def test_the_caches_are_those_of_the_cpu(case: CacheCase, dtype: torch.dtype) -> None:
    if case.int8_key and dtype == torch.int8:
        pytest.skip("key and value are both int8 in the other samples")
    sample = build(case, dtype)
    on_cpu = copy_of_caches(sample)
    on_cpu.call(torch.ops.ascend)
    variants = [to_npu(sample)]
    if case.scatter != "Nct":
        variants.append(to_npu(strided(sample)))
    for on_npu in variants:
        on_npu = copy_of_caches(on_npu)
        assert on_npu.call(torch.ops.ascend) == ()
        assert all(torch.equal(x, y) for x, y in zip(caches(on_npu), caches(on_cpu), strict=True))


def recorded(call: Any) -> dict[str, Any]:
    with cann_simulator.computing(False), cann_simulator.recorded_calls() as log:
        call()
    first, second = attention_calls(log)
    assert first["function"] == second["function"] == FUNCTION
    arguments: dict[str, Any] = first["arguments"]
    return arguments


@pytest.mark.parametrize("key_only", [False, True], ids=["key and value", "key only"])
@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_our_call_is_torch_npus(mode: str, key_only: bool, index: torch.dtype) -> None:
    if key_only and mode == "PA_NZ":
        pytest.skip("there is no such scenario")
    sample = to_npu(build(CacheCase(cache_mode=mode, index=index), torch.bfloat16))
    x = dict(sample.inputs)
    if key_only:
        # torch_npu has no other way to leave them out.
        x["value"] = x["value_cache"] = torch.empty((), dtype=torch.bfloat16).npu()
        sample = sample.replace(value=None, value_cache=None)
    theirs = recorded(
        lambda: torch.ops.npu.npu_scatter_pa_kv_cache(
            x["key"], x["value"], x["key_cache"], x["value_cache"], x["slot_mapping"],
            cache_mode=mode,
        )
    )  # fmt: skip
    ours = recorded(lambda: sample.call(torch.ops.ascend))
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert comparable(value) == comparable(theirs[name]), name


NAMES = {
    "key": "key", "keyCacheRef": "key_cache", "slotMapping": "slot_mapping", "value": "value",
    "valueCacheRef": "value_cache", "compressLensOptional": "compress_lens",
    "compressSeqOffsetOptional": "compress_seq_offset", "seqLensOptional": "seq_lens",
    "cacheModeOptional": "cache_mode", "scatterModeOptional": "scatter_mode",
    "stridesOptional": "strides", "offsetsOptional": "offsets",
}  # fmt: skip
"""The prototype of the document, in its order, and whose value each argument must have."""


@pytest.mark.parametrize(
    "case",
    list(
        {(c.cache_mode, c.scatter, c.rank): c for c in reversed(CASES) if not c.key_only}.values()
    ),
    ids=lambda case: case.id,
)
@pytest.mark.usefixtures("no_limits")
def test_the_call_is_the_documents(case: CacheCase) -> None:
    """For the modes that torch_npu cannot reach, too."""
    sample = to_npu(build(case, torch.float16))
    if sample.inputs["key"].numel() == 0:
        pytest.skip("nothing is called")
    arguments = recorded(lambda: sample.call(torch.ops.ascend))
    assert list(arguments) == list(NAMES)
    for name, ours in NAMES.items():
        given, got = sample.arguments[ours], arguments[name]
        if isinstance(given, Tensor):
            assert got["address"] == given.untyped_storage().data_ptr(), name
            assert got["sizes"] == list(given.shape), name
            assert got["strides"] == list(given.stride()), name
            assert got["offset"] == given.storage_offset(), name
        else:
            assert got == given, name


@pytest.mark.usefixtures("no_leak")
def test_no_rows_no_call() -> None:
    sample = to_npu(build(CacheCase(rows=0), torch.float16))
    with cann_simulator.recorded_calls() as log:
        sample.call(torch.ops.ascend)
    assert not attention_calls(log)
