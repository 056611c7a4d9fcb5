"""The layouts of caches beyond the plain one: 5 axes, blocks of heads, and blocks with gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import reference
from ascend_attn_ops.reference.call import bytes_of
from support.torch_defects import INDUCTOR_LOSES_THE_OFFSET
from torch import Tensor

BLOCKS, BLOCK, HEADS, D = 5, 8, 3, 32
SLOTS = torch.tensor([3, -1, 39, 17, 16, 0, 30, 8, 9])


def rows(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randint(-100, 100, (len(SLOTS), HEADS, D)).to(dtype)


def plain(x: Tensor) -> Tensor:
    return x


def by_heads(x: Tensor) -> Tensor:
    """The memory of (num_blocks, N, block_size, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_gaps(x: Tensor) -> Tensor:
    """One of three caches in one buffer, block by block."""
    buffer = torch.ones_like(x)[:, None].repeat(1, 3, *(1,) * (x.dim() - 1))
    return buffer.select(1, 1).copy_(x)


def by_heads_with_gaps(x: Tensor) -> Tensor:
    return with_gaps(x.transpose(1, 2)).transpose(1, 2)


def five_axes(x: Tensor) -> Tensor:
    return x.unflatten(1, (HEADS, -1))


def five_axes_with_gaps(x: Tensor) -> Tensor:
    return with_gaps(five_axes(x))


LAYOUTS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("Norm", by_heads), ("Norm", with_gaps), ("Norm", by_heads_with_gaps),
    ("PA_NZ", five_axes), ("PA_NZ", with_gaps), ("PA_NZ", five_axes_with_gaps),
]  # fmt: skip


def new_caches(mode: str, dtypes: list[torch.dtype]) -> list[Tensor]:
    caches = []
    for dtype in dtypes:
        cache = torch.arange(BLOCKS * BLOCK * HEADS * D).remainder(101).to(dtype)
        cache = cache.view(BLOCKS, BLOCK, HEADS, D)
        caches.append(ops.nd_to_nz(cache) if mode == "PA_NZ" else cache)
    return caches


def written(
    mode: str, dtypes: list[torch.dtype], layout: Callable[[Tensor], Tensor], **options: Any
) -> list[Tensor]:
    """Asserts that operator and reference agree, also on what lies around the caches."""
    torch.manual_seed(0)
    key, value = (rows(dtype) for dtype in dtypes)
    ours, expected = ([layout(x.clone()) for x in new_caches(mode, dtypes)] for _ in range(2))
    options |= {"cache_mode": mode}
    for namespace, (key_cache, value_cache) in ((torch.ops.ascend, ours), (reference, expected)):
        namespace.scatter_pa_kv_cache_(key, key_cache, SLOTS, value, value_cache, **options)
    for x, y in zip(ours, expected, strict=True):
        assert torch.equal(bytes_of(_whole(x)), bytes_of(_whole(y)))
    return ours


def _whole(x: Tensor) -> Tensor:
    """All elements of the buffer that x is a view of."""
    return torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())


@pytest.mark.parametrize(("mode", "layout"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_every_layout_holds_the_same_cache(
    mode: str, layout: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    for x, y in zip(
        written(mode, [dtype] * 2, layout), written(mode, [dtype] * 2, plain), strict=True
    ):
        assert torch.equal(x.reshape(y.shape), y)


@pytest.mark.parametrize("layout", [by_heads, with_gaps, by_heads_with_gaps])
def test_nct_writes_to_every_layout(layout: Callable[[Tensor], Tensor]) -> None:
    buffer = torch.randn(len(SLOTS), 2 * HEADS * D).bfloat16()
    key = buffer.view(-1)[: len(SLOTS) * HEADS * D].view(len(SLOTS), HEADS, D)
    (cache,) = new_caches("Norm", [torch.bfloat16])
    ours, expected = layout(cache.clone()), cache
    options: dict[str, Any] = {
        "scatter_mode": "Nct", "strides": [2 * HEADS * D, 1], "offsets": [HEADS * D, 0]
    }  # fmt: skip
    torch.ops.ascend.scatter_pa_kv_cache_(key, ours, SLOTS, **options)
    reference.scatter_pa_kv_cache_(key, expected, SLOTS, **options)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)],
    ids=["key bfloat16", "key float16"],
)  # fmt: skip
@pytest.mark.parametrize("cann", ["8.5", "9.0", "9.1"])
def test_pa_nz_takes_half_types_that_differ(dtypes: tuple[torch.dtype, ...], cann: Any) -> None:
    with ops.limits("A2", cann=cann):
        written("PA_NZ", list(dtypes), plain)


def test_large_rows_are_streamed_to_every_layout() -> None:
    """A side of 32 MiB and more takes another way to memory."""
    key = torch.randn(2048, 64, 128).bfloat16()
    cache = torch.zeros(17, 128, 64, 128).bfloat16()
    slots = torch.randperm(17 * 128)[:2048]
    for layout in (by_heads, with_gaps):
        ours = layout(cache)
        torch.ops.ascend.scatter_pa_kv_cache_(key, ours, slots)
        assert torch.equal(ours.flatten(0, 1)[slots], key)


def test_both_caches_may_be_slices_of_one_buffer() -> None:
    """The blocks of the caches alternate, as in vLLM; caches that share elements are an error."""
    buffer = torch.zeros(BLOCKS, 2, BLOCK, HEADS, D).bfloat16()
    key, value = rows(), rows()
    torch.ops.ascend.scatter_pa_kv_cache_(key, buffer[:, 0], SLOTS, value, buffer[:, 1])
    for i, source in enumerate((key, value)):
        kept = SLOTS >= 0
        assert torch.equal(buffer[:, i].flatten(0, 1)[SLOTS[kept]], source[kept])

    shifted = buffer.view(-1)[: buffer.numel() - buffer.stride(1) // 2]
    for offset in (0, buffer.stride(1) // 2):
        other = shifted.as_strided((BLOCKS - 1, BLOCK, HEADS, D), buffer[:, 0].stride(), offset)
        before = buffer.clone()
        with pytest.raises(ValueError, match="value_cache: expected memory of its own"):
            torch.ops.ascend.scatter_pa_kv_cache_(
                key[:2], buffer[: BLOCKS - 1, 0], SLOTS[:2], value[:2], other
            )
        assert torch.equal(buffer, before)


def test_rows_may_lie_in_the_gaps_and_not_in_the_blocks() -> None:
    buffer = torch.randn(BLOCKS, 2, BLOCK, HEADS, D).bfloat16()
    cache, gap = buffer[:, 0], buffer[2, 1]
    torch.ops.ascend.scatter_pa_kv_cache_(gap, cache, torch.arange(8))
    assert torch.equal(cache[0], gap)
    with pytest.raises(ValueError, match="key: expected memory of its own, got some of key_cache"):
        torch.ops.ascend.scatter_pa_kv_cache_(buffer[4, 0], cache, torch.arange(8))


def overlapping(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, (x.stride(0) // 2, *x.stride()[1:]))


def d_with_gaps(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]


def d_before_heads(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("layout", [overlapping, d_with_gaps, d_before_heads])
@pytest.mark.parametrize("mode", ["Norm", "PA_NZ"])
@pytest.mark.usefixtures("no_limits")
def test_other_strides_are_refused(mode: str, layout: Callable[[Tensor], Tensor]) -> None:
    (cache,) = new_caches(mode, [torch.bfloat16])
    key, before = rows(), cache.clone()
    with pytest.raises(ValueError, match="key_cache: expected a contiguous tensor, or one of"):
        torch.ops.ascend.scatter_pa_kv_cache_(
            key, layout(cache), SLOTS, key, cache.clone(), cache_mode=mode
        )
    assert torch.equal(cache, before)


def write(key: Tensor, memory: Tensor, slots: Tensor) -> Tensor:
    ops.scatter_pa_kv_cache_(key, memory.transpose(1, 2), slots)
    return memory.float().sum()


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR_LOSES_THE_OFFSET)]
)
def test_compiles(backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(write, fullgraph=True, dynamic=True, backend=backend)
    ours, eager = (torch.ones(BLOCKS, 2, HEADS, BLOCK, D).bfloat16()[:, 1] for _ in range(2))
    for tokens in (3, 5, 9):
        key = rows()[:tokens]
        out = compiled(key, ours, SLOTS[:tokens])
        torch.testing.assert_close(out, write(key, eager, SLOTS[:tokens]))
        assert torch.equal(ours, eager)


# Keys of rank 4, whose scatter_mode names what is written.


@pytest.mark.parametrize("device", [(None, None), ("950", "9.1")], ids=str)
@pytest.mark.parametrize("mode", ["None", "Alibi", "Rope", "Omni"])
def test_the_scatter_mode_of_rank_4(mode: str, device: tuple[Any, Any]) -> None:
    torch.manual_seed(0)
    key = torch.randn(2, 9, 2, D)
    options: dict[str, Any] = {
        "compress_lens": torch.tensor([[3, 0], [2, 5]]), "seq_lens": torch.tensor([9, 7]),
        "scatter_mode": mode,
    }  # fmt: skip
    if mode != "Alibi":
        options["compress_seq_offset"] = torch.tensor([2, 1, -1, 0])
    slots = torch.tensor([[0, 10], [20, 30]])
    ours, expected = (torch.zeros(BLOCKS, BLOCK, 1, D) for _ in range(2))
    with ops.limits(*device):
        torch.ops.ascend.scatter_pa_kv_cache_(key, ours, slots, key, ours.clone(), **options)
    reference.scatter_pa_kv_cache_(key, expected, slots, key, expected.clone(), **options)
    assert torch.equal(ours, expected)
    assert ours.any()
