"""scatter_pa_kv_cache_ in every scenario: what it writes, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.samples.scatter_pa_kv_cache import CASES, CacheCase, build
from ascend_attn_ops import reference
from ascend_attn_ops.reference.call import Sample, bytes_of
from torch import Tensor

np = pytest.importorskip("numpy", reason="numpy is not installed")

pytestmark = pytest.mark.usefixtures("no_limits")

DTYPES = [
    torch.float16, torch.bfloat16, torch.int8, torch.float32, torch.uint8, torch.int16,
    torch.uint16, torch.int32, torch.uint32, torch.float8_e5m2, torch.float8_e4m3fn, torch.float64,
]  # fmt: skip
DTYPES_950 = DTYPES[:-1]
# One of every scenario.
SCENARIOS = list(
    {(c.cache_mode, c.scatter, c.rank, c.key_only): c for c in reversed(CASES)}.values()
)

each_scenario = pytest.mark.parametrize("case", SCENARIOS, ids=lambda case: case.id)
OPERATOR = torch.ops.ascend.scatter_pa_kv_cache_.default


def of_bytes(tensors: list[Tensor]) -> list[Tensor]:
    return [bytes_of(x) for x in tensors]


def caches(sample: Sample) -> list[Tensor]:
    return of_bytes([x for name, x in sample.tensors.items() if name.endswith("_cache")])


def after(sample: Sample, namespace: Any = torch.ops.ascend) -> list[Tensor]:
    """The bytes of the caches after the call, which happens to copies of them."""
    copy = clone(sample)
    assert copy.call(namespace) == ()
    return caches(copy)


def clone(sample: Sample) -> Sample:
    """Copies the caches, but not the sources: "Nct" reads beyond the elements of a source."""
    names = ("key_cache", "value_cache")
    return sample.replace(**{n: x.clone() for n, x in sample.tensors.items() if n in names})


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y), f"{int((x != y).sum())} bytes differ"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_the_bytes_of_the_reference(case: CacheCase, dtype: torch.dtype) -> None:
    """The mean as well: float32, in the order of the rows. And what it reads stays."""
    sample = build(case, dtype)
    expected = after(sample, reference)
    before = of_bytes([x.clone() for x in sample.tensors.values()])
    assert_same(after(sample), expected)
    assert_same(of_bytes(list(sample.tensors.values())), before)
    changed = any(not torch.equal(x, y) for x, y in zip(caches(sample), expected, strict=True))
    nothing_to_write = case.slots == "all skipped" or sample.inputs["key"].numel() == 0
    assert changed != nothing_to_write


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.scatter != "Nct" and not c.int8_key], ids=lambda case: case.id
)
def test_strides_of_the_sources_change_nothing(case: CacheCase) -> None:
    sample = build(case, torch.bfloat16)
    expected = after(sample)
    names = [name for name in ("key", "value") if name in sample.tensors]

    def variant(change: Any) -> Sample:
        return sample.replace(**{name: change(sample.tensors[name]) for name in names})

    def wider(x: Tensor, axis: int) -> Tensor:
        return torch.cat((x, torch.ones_like(x)), axis).narrow(axis, 0, x.shape[axis])

    for axis in (-3, -2, -1):
        assert_same(after(variant(lambda x, axis=axis: wider(x, axis))), expected)
        assert_same(
            after(variant(lambda x, axis=axis: x.movedim(axis, 0).contiguous().movedim(0, axis))),
            expected,
        )


@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_bit_pattern_survives(dtype: torch.dtype, mode: str) -> None:
    """These include NaN payloads, signalling NaN, infinities, both zeros and subnormal numbers."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    key = patterns.view(512, 2, 64).view(dtype)
    cache = torch.zeros(4, 128, 2, 64, dtype=dtype)
    if mode == "PA_NZ":
        cache = ops.nd_to_nz(cache)
    slots = torch.randperm(512)
    other = cache.clone()
    ops.scatter_pa_kv_cache_(key, cache, slots, key, other, cache_mode=mode)
    written = ops.nz_to_nd(cache, 2) if mode == "PA_NZ" else cache
    assert torch.equal(written.flatten(0, 1)[slots].view(torch.int16), key.view(torch.int16))
    assert torch.equal(cache.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES_950, ids=str)
@pytest.mark.parametrize(
    "case", [c for c in CASES if c.rank == 4 or (c == replace(CacheCase(), slots=c.slots))],
    ids=lambda case: case.id,
)  # fmt: skip
@pytest.mark.parametrize("modes", [("Norm", "None"), ("PA_NZ", "Omni")], ids=str)
def test_950_ignores_the_modes_before_cann_9_1(
    dtype: torch.dtype, case: CacheCase, modes: tuple[str, str]
) -> None:
    sample = build(case, dtype)
    expected = after(sample, reference)
    with ops.limits("950", cann="9.0"):
        assert_same(after(sample.replace(cache_mode=modes[0], scatter_mode=modes[1])), expected)


def test_a_column_slice_needs_no_strides() -> None:
    """The strides of a tensor can express a call in scatter_mode "Nct"."""
    case = CacheCase("Nct", rows=19, d=(16, 16))
    sample = build(case, torch.float16)
    sources = {
        name: torch.as_strided(x, x.shape, (stride, 16, 1), x.storage_offset() + offset)
        for name, stride, offset in zip(
            ("key", "value"), sample.options["strides"], sample.options["offsets"], strict=True
        )
        for x in (sample.inputs[name],)
    }
    plain = sample.replace(scatter_mode="None", strides=[1, 1], offsets=[0, 0], **sources)
    assert_same(after(plain), after(sample))


@each_scenario
def test_opcheck(case: CacheCase) -> None:
    # opcheck copies the tensors without what lies beyond their elements.
    case = replace(case, scatter="None") if case.scatter == "Nct" else case
    # It compares elements: a NaN would differ from itself.
    sample = build(case, torch.bfloat16).map(
        lambda x: x.nan_to_num() if x.dtype.is_floating_point else x
    )
    torch.library.opcheck(OPERATOR, sample.args, sample.options)


# Functionalization: what a compiled step writes is there for what it reads, and afterwards.


def write(key: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor) -> None:
    key_cache, value_cache = caches
    ops.scatter_pa_kv_cache_(key, key_cache, slots, value, value_cache)


def write_in_two_calls(
    key: Tensor, value: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor
) -> None:
    """The way around the defect below, which the documentation names."""
    for rows, cache in zip((key, value), caches, strict=True):
        ops.scatter_pa_kv_cache_(rows, cache, slots)


def decode_step(
    update: Callable[..., None], key: Tensor, value: Tensor, query: Tensor,
    caches: tuple[Tensor, Tensor], slots: Tensor,
) -> Tensor:  # fmt: skip
    update(key, value, caches, slots)
    keys, values = (cache.flatten(0, 1)[:32].transpose(0, 1) for cache in caches)
    return torch.nn.functional.scaled_dot_product_attention(query.transpose(0, 1), keys, values)


# torch 2.13 loses the offset of the second of two views of one buffer that an operator mutates: any
# torch.library.custom_op shows it as well. With dynamic=False, or in two calls, they are written.
INDUCTOR_LOSES_AN_OFFSET = pytest.mark.xfail(
    torch.__version__ >= (2, 13), strict=True,
    reason="inductor, dynamic=True, two mutated views of one buffer",
)  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "shared", "update"),
    [
        pytest.param("aot_eager", False, write, id="aot_eager"),
        pytest.param("inductor", False, write, id="inductor"),
        pytest.param("aot_eager", True, write, id="aot_eager, one buffer"),
        pytest.param(
            "inductor", True, write, id="inductor, one buffer", marks=INDUCTOR_LOSES_AN_OFFSET
        ),
        pytest.param("inductor", True, write_in_two_calls, id="inductor, two calls"),
    ],
)
def test_a_compiled_decode_step_updates_the_cache(
    backend: str, shared: bool, update: Callable[..., None]
) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    step = partial(decode_step, update)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    both = torch.randn(2, 5, 16, 4, 32, dtype=torch.bfloat16)
    ours, eager = (
        tuple(copy) if shared else tuple(x.clone() for x in copy)
        for copy in (both.clone(), both.clone())
    )
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 5, 9):
            key, value, query = (torch.randn(tokens, 4, 32).bfloat16() for _ in range(3))
            slots = torch.randperm(40)[:tokens].int()
            out = compiled(key, value, query, ours, slots)
            torch.testing.assert_close(out, step(key, value, query, eager, slots))
            assert all(torch.equal(x, y) for x, y in zip(ours, eager, strict=True))


@each_scenario
def test_compiles_in_every_scenario(case: CacheCase) -> None:
    sample = build(case, torch.bfloat16)
    expected = after(sample)
    torch._dynamo.reset()
    actual = clone(sample)
    compiled = torch.compile(
        lambda *args, **options: OPERATOR(*args, **options), fullgraph=True, backend="aot_eager"
    )
    compiled(*actual.args, **actual.options)
    assert_same(caches(actual), expected)


def test_export() -> None:
    sample = build(CacheCase(slots="all"), torch.float32)

    class Module(torch.nn.Module):
        def forward(self, key: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
            OPERATOR(key, cache, slots)
            return cache.sum()

    tensors = (sample.inputs["key"], torch.zeros(4, 8, 2, 32), sample.inputs["slot_mapping"])
    rows = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Module(), tensors, dynamic_shapes=(rows, None, rows))
    cache, key, slots = torch.zeros(4, 8, 2, 32), torch.ones(3, 2, 32), torch.tensor([9, -1, 0])
    assert program.module()(key, cache, slots.int()) == 128
    assert cache[1, 1].eq(1).all()
    assert cache[0, 0].eq(1).all()


# Autograd.


@pytest.mark.parametrize("name", ["key", "key_cache", "value", "value_cache"])
def test_a_lost_gradient_is_an_error(name: str) -> None:
    sample = build(CacheCase(), torch.bfloat16)
    sample = sample.replace(**{name: sample.tensors[name].clone().requires_grad_()})
    before = [x.clone() for x in caches(sample)]
    with pytest.raises(NotImplementedError, match=rf"^ascend::scatter_pa_kv_cache_: {name}: "):
        sample.call(torch.ops.ascend)
    assert_same(caches(sample), before)
    with torch.no_grad():
        assert_same(after(sample), after(sample, reference))


def test_autograd_notices_that_a_saved_cache_has_changed() -> None:
    cache, weight = torch.ones(1, 2, 1, 4).half(), torch.ones(4).half().requires_grad_()
    product = (cache * weight).sum()
    ops.scatter_pa_kv_cache_(torch.zeros(1, 1, 4).half(), cache, torch.tensor([1]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# The helpers.


def test_slots_of_positions() -> None:
    table = torch.tensor([[7, 2], [5, -1]], dtype=torch.int32)
    positions = torch.tensor([[0, 5, -1], [3, 4, 2]])
    slots = ops.slot_mapping(table, positions, 4)
    assert slots.dtype == torch.int32
    assert slots.tolist() == [[28, 9, -1], [23, -1, 22]]
    assert ops.slot_mapping(table, positions[:, 1], 4).tolist() == [9, -1]
    assert ops.slot_mapping(table[0], positions[0], 4).tolist() == [28, 9, -1]
    many = torch.tensor([[2**28, 7]])
    assert ops.slot_mapping(many, torch.tensor([[3]]), 16).tolist() == [[2**32 + 3]]
    # The largest block of int32, and one beyond that only padding reads.
    most = torch.tensor([[2**27 - 1], [2**27]], dtype=torch.int32)
    assert ops.slot_mapping(most, torch.tensor([15, -1]), 16).tolist() == [2**31 - 1, -1]
    assert ops.slot_mapping(most[:, :0], torch.tensor([-1, -1]), 16).tolist() == [-1, -1]


# Rules about memory; samples/scatter_pa_kv_cache_errors.py has the other rules.

SLOTS = torch.tensor([1, 2, 0])
RUNS = CacheCase("Rope", lengths=(9, 0, 5, 3), blocks=(6, 8))


def refused(argument: str, words: str, *tensors: Tensor, **options: object) -> None:
    """Asserts that a call with overlapping tensors is refused, and that their bytes stay."""
    before = [bytes_of(x.clone()) for x in tensors]
    expected = rf"scatter_pa_kv_cache_: {argument}: expected .*{words}.* 161002"
    with pytest.raises(ValueError, match=expected):
        torch.ops.ascend.scatter_pa_kv_cache_(*tensors, **options)
    assert all(torch.equal(bytes_of(x), y) for x, y in zip(tensors, before, strict=True))


def test_rows_of_nct_are_where_offsets_and_strides_say() -> None:
    """Not where key is: that may be in the cache, and they may be behind it."""
    buffer = torch.arange(96.0)
    key, nct = buffer[:24].view(3, 1, 8), {"scatter_mode": "Nct", "strides": (8, 1)}
    cache = buffer[32:64].view(1, 4, 1, 8)
    refused("key", "some of key_cache", key, cache, SLOTS, **nct, offsets=(24, 0))
    cache, rows = buffer[:32].view(1, 4, 1, 8), buffer[40:64].clone().view(3, 1, 8)
    torch.ops.ascend.scatter_pa_kv_cache_(key, cache, SLOTS, **nct, offsets=(40, 0))
    assert torch.equal(cache[0, SLOTS], rows)


def test_a_cache_may_lie_between_the_rows() -> None:
    buffer = torch.arange(128.0).view(2, 64)
    key, slots = buffer[:, :8].view(2, 1, 8), SLOTS[:2]
    cache = buffer[0, 16:48].view(1, 4, 1, 8)
    torch.ops.ascend.scatter_pa_kv_cache_(key, cache, slots)
    assert torch.equal(cache[0, slots], key)
    refused("key", "some of key_cache", key, buffer[0, 4:36].view(1, 4, 1, 8), slots)


def test_a_cache_of_one_block_may_have_any_stride() -> None:
    """With one block, the stride between blocks is never used."""
    buffer = torch.zeros(64)
    caches = buffer[:32].view(2, 2, 8).transpose(0, 1).unsqueeze(0), buffer[32:].view(1, 2, 2, 8)
    for cache in (x.as_strided(x.shape, (0, *x.stride()[1:])) for x in caches):
        key = torch.arange(1.0, 17.0).view(1, 2, 8)
        torch.ops.ascend.scatter_pa_kv_cache_(key, cache, torch.tensor([1]))
        assert torch.equal(cache[0, 1], key[0])
        assert not cache[0, 0].any()
        refused("key", "some of key_cache", cache[0, 1:], cache, torch.tensor([0]))
    # The same holds for two caches that share memory.
    first, second = (x.as_strided(x.shape, (0, *x.stride()[1:])) for x in caches)
    key = torch.ones(1, 2, 8)
    torch.ops.ascend.scatter_pa_kv_cache_(key, first, torch.tensor([0]), 2 * key, second)
    assert torch.equal(first[0, 0], key[0])
    assert torch.equal(second[0, 0], 2 * key[0])
    refused("value_cache", "some of key_cache", key, first, torch.tensor([0]), key, first)


@pytest.mark.parametrize("size", [1024, 1021])
def test_more_rows_than_stay_in_a_processors_cache(size: int) -> None:
    """33 MiB, in rows of whole vectors and in others."""
    blocks, block_size, count = 300, 128, 33_792
    key = torch.randint(-128, 128, (count, 1, size), dtype=torch.int8)
    slots = torch.randperm(blocks * block_size)[:count].to(torch.int32)
    slots[7] = -1
    cache = torch.full((blocks, block_size, 1, size), 5, dtype=torch.int8)
    expected = cache.view(-1, 1, size).clone()
    expected[slots[slots >= 0]] = key[slots >= 0]
    torch.ops.ascend.scatter_pa_kv_cache_(key, cache, slots)
    assert torch.equal(cache.view(-1, 1, size), expected)


def test_indices_and_other_storages_are_not_in_a_cache() -> None:
    numbers = torch.ones(1, 4, 1, 8, dtype=torch.int32)
    indices = numbers.view(-1)[:2]
    refused("slot_mapping", "some of key_cache", numbers[0, :2].clone(), numbers, indices)
    for name in ("compress_lens", "compress_seq_offset", "seq_lens"):
        sample = build(RUNS, torch.int32)
        cache = sample.inputs["key_cache"]
        given = sample.options[name]
        inside = cache.view(-1)[: given.numel()].copy_(given)
        with pytest.raises(ValueError, match=f"{name}: expected memory of its own"):
            sample.replace(**{name: inside}).call(torch.ops.ascend)
    memory = np.arange(64, dtype=np.float32)
    key, cache = torch.from_numpy(memory)[:24], torch.from_numpy(memory)[8:40]
    refused("key", "some of key_cache", key.view(3, 1, 8), cache.view(1, 4, 1, 8), SLOTS)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["key_cache", "value_cache"])
def test_a_cache_is_no_view_that_negates(name: str, mode: Callable[[], Any]) -> None:
    sample = build(CacheCase(), torch.bfloat16)
    sample = sample.replace(**{name: torch._neg_view(sample.arguments[name])})
    refused_before = bytes_of(sample.arguments["key_cache"].clone())
    with mode(), pytest.raises(ValueError, match=f"{name}: expected .* a view that negates"):
        sample.call(torch.ops.ascend)
    assert torch.equal(bytes_of(sample.arguments["key_cache"].clone()), refused_before)


def test_a_key_may_be_a_view_that_negates() -> None:
    key, cache = torch.ones(3, 2, 16).half(), torch.zeros(2, 4, 2, 16).half()
    torch.ops.ascend.scatter_pa_kv_cache_(torch._neg_view(key), cache, SLOTS)
    assert torch.equal(cache[0, :3], -key)


def test_a_cache_of_inference_mode_is_written_there_alone() -> None:
    with torch.inference_mode():
        value_cache = torch.zeros(2, 4, 2, 16).half()
    key, key_cache = torch.ones(3, 2, 16).half(), torch.zeros(2, 4, 2, 16).half()
    refused("value_cache", "inference mode", key, key_cache, SLOTS, key.clone(), value_cache)
    with torch.inference_mode():
        torch.ops.ascend.scatter_pa_kv_cache_(key, key_cache, SLOTS, key, value_cache)
    assert torch.equal(key_cache, value_cache)
    assert key_cache.any()


def test_the_order_of_torch_npu_is_named() -> None:
    key, cache = torch.zeros(2, 1, 64), torch.zeros(4, 16, 1, 64)
    with pytest.raises(TypeError, match=r"slot_mapping: expected whole numbers .* another order"):
        ops.scatter_pa_kv_cache_(key, key, cache, cache, torch.tensor([5, 63]))
