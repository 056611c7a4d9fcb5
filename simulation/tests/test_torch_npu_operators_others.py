"""Sparse attention, caches, merges, layers and casts of torch_npu on the simulated NPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
import torch_npu
from support.attention import attention
from support.tolerance import assert_close
from torch import Tensor
from torch_npu_calls import HALF, TOLERANCES, check, takes, values

pytestmark = pytest.mark.usefixtures("no_leak")

B, N, D = 2, 4, 16
each_dtype = pytest.mark.parametrize("dtype", [*HALF, torch.float32])
# Sparse attention has so many queries, keys, heads, and keys for each query.
S1, S2, HEADS, COUNT = 6, 40, 8, 16


def sparse_tensors(
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Queries and keys as (B, S, N, D), and for each query keys that it may see."""
    shapes = (HEADS, 512), (HEADS, 64), (HEADS, 128), (HEADS,)
    queries = [values(B, S1, *shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    keys = [values(B, S2, 1, size, seed=size).to(dtype) for size in (512, 64, 128)]
    generator = torch.Generator().manual_seed(0)
    visible = [S2 - S1 + 1 + i for i in range(S1)] * B
    rows = [torch.randperm(count, generator=generator)[:COUNT] for count in visible]
    return queries, keys, torch.stack(rows).view(B, S1, 1, COUNT).int()


@pytest.mark.parametrize("dtype", HALF)
def test_sparse_attention(dtype: torch.dtype) -> None:
    """And the indexer and its loss."""
    queries, keys, chosen = sparse_tensors(dtype)
    query, query_rope, index_query, weights = queries
    key, key_rope, index_key = keys
    statistics = [torch.full((B, 1, S1, HEADS), x) for x in (3.0, 1.0)]
    given = (query, key, index_query, index_key, weights / 64, chosen, *statistics, 0.05)
    ropes = {"query_rope": query_rope, "key_rope": key_rope}
    check("npu_sparse_lightning_indexer_grad_kl_loss", *given, **ropes)
    for x in (*queries, *keys):
        x.requires_grad_()
    options = {"attention_mode": 2, "return_softmax_lse": True}
    check("npu_sparse_flash_attention", query, key, key, chosen, 0.05, **ropes, **options)
    options = {"sparse_count": COUNT, "return_value": True}
    check("npu_lightning_indexer", index_query, index_key, weights, **options)


@takes("npu_sparse_flash_attention", "sinks")
def test_sinks_of_sparse_attention() -> None:
    (query, query_rope, *_), (key, key_rope, _), chosen = sparse_tensors()
    sinks = values(HEADS, seed=5).float()
    ropes = {"query_rope": query_rope.npu(), "key_rope": key_rope.npu(), "attention_mode": 2}
    query_there, key_there, there = (x.npu() for x in (query, key, chosen))
    given = (query_there, key_there, key_there, there)
    out = torch_npu.npu_sparse_flash_attention(*given, 0.05, sinks=sinks.npu(), **ropes)[0]
    kept = torch.zeros(B, 1, S1, S2, dtype=torch.bool)
    kept.scatter_(3, chosen.transpose(1, 2).long(), True)
    pairs = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1), key
    heads_first = [x.transpose(1, 2) for x in pairs]
    expected = attention(*heads_first, kept, 0.05, sink=sinks)[0].transpose(1, 2)
    assert_close("out", out.cpu(), expected, TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("options", [{"cache_mode": "Norm"}, {}], ids=["rows", "fractals"])
@pytest.mark.parametrize("dtype", [*HALF, torch.int8])
def test_caches(dtype: torch.dtype, options: dict[str, str]) -> None:
    given = [(10 * values(5, 2, 64, seed=i)).to(dtype) for i in (1, 2)]
    lanes = 32 // dtype.itemsize
    shape = (4, 16, 2, 64) if options else (4, 128 // lanes, 16, lanes)
    slots = torch.tensor([3, 17, 63, 16, 0], dtype=torch.int32)
    written = []
    for device in ("npu", "cpu"):
        caches = [torch.zeros(shape, dtype=dtype).to(device) for _ in range(2)]
        there = [x.to(device) for x in (*given, slots)]
        torch_npu.npu_scatter_pa_kv_cache(*there[:2], *caches, there[2], **options)
        written.append([x.cpu() for x in caches])
    assert all(map(torch.equal, *written))
    assert all(x.any() for x in written[0])


@each_dtype
@pytest.mark.parametrize("update_type", [0, 1])
def test_attention_update(update_type: int, dtype: torch.dtype) -> None:
    lse = [values(20, seed=i).float() for i in range(2)]
    outs = [values(20, 32, seed=i).to(dtype) for i in range(2)]
    check("npu_attention_update", lse, outs, update_type)


@takes("npu_ring_attention_update")
@each_dtype
@pytest.mark.parametrize(("layout", "order"), [("SBH", ""), ("TND", ""), ("TND", "TND")])
def test_ring_attention_update(layout: str, order: str, dtype: torch.dtype) -> None:
    packed = layout == "TND"
    shape, of_statistics = ((9, N, D), (9, N, 1)) if packed else ((5, B, N * D), (B, N, 5, 1))
    given = []
    for i in range(2):
        top, total = (values(*of_statistics, seed=seed) for seed in (i + 2, i + 4))
        statistics = [x.float().repeat_interleave(8, -1) for x in (top, total.abs() + 1)]
        given += [values(*shape, seed=i).to(dtype), *statistics]
    options = {"input_layout": layout, "input_softmax_layout": order}
    if packed:
        options["actual_seq_qlen"] = torch.tensor([0, 3, 8, 9])
    check("npu_ring_attention_update", *given, **options)


@each_dtype
def test_norms_and_activations(dtype: torch.dtype) -> None:
    def leaf(*shape: int, seed: int = 0) -> Tensor:
        return values(*shape, seed=seed).to(dtype).requires_grad_()

    for shape in ((32,), (5, 32)):
        check("npu_rms_norm", leaf(3, 5, 32), leaf(*shape, seed=1), 0.01)
    added = [leaf(3, 5, 32), leaf(3, 5, 32, seed=1), leaf(32, seed=2)]
    check("npu_add_rms_norm", *(x.detach() for x in added), 0.01)
    for mode in ("half", "interleave"):
        turn = [leaf(1, 5, 1, 64, seed=seed) for seed in (1, 2)]
        check("npu_rotary_mul", leaf(2, 5, 3, 64), *turn, mode)
    for dim in (-1, 0, 1):
        check("npu_swiglu", leaf(4, 6, 64), dim=dim)


@pytest.mark.parametrize("activate_left", [False, True])
@pytest.mark.parametrize(("dim", "approximate"), [(-1, 1), (-1, 0), (0, 1)])
@each_dtype
def test_geglu(dim: int, approximate: int, activate_left: bool, dtype: torch.dtype) -> None:
    rounded = values(4, 6, 64).to(dtype)
    x, exact = rounded.npu().requires_grad_(), rounded.double().requires_grad_()
    factor, gated = exact.chunk(2, dim)[:: -1 if activate_left else 1]
    gelu = torch.nn.functional.gelu(gated, approximate=["none", "tanh"][approximate])
    y, actual_gelu = torch_npu.npu_geglu(x, dim, approximate, activate_left)
    dy = values(*gelu.shape, seed=9).to(dtype)
    (gradient,) = torch.autograd.grad(y, x, dy.npu())
    (expected,) = torch.autograd.grad(factor * gelu, exact, dy.double())
    pairs = {"y": (y, factor * gelu), "gelu": (actual_gelu, gelu), "dx": (gradient, expected)}
    for name, (actual, other) in pairs.items():
        assert actual.dtype == dtype
        assert_close(name, actual.detach().cpu(), other, TOLERANCES[dtype])


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
def test_dtype_cast(to: torch.dtype) -> None:
    x = 100 * values(3, 5).float()
    assert torch.equal(torch_npu.npu_dtype_cast(x.npu(), to).cpu(), x.to(to))


@pytest.fixture
def internal_formats() -> Iterator[None]:
    """torch_npu makes other formats than ND where that is allowed."""
    torch.npu.config.allow_internal_format = True
    yield
    torch.npu.config.allow_internal_format = False


@each_dtype
@pytest.mark.usefixtures("internal_formats")
def test_format_cast(dtype: torch.dtype) -> None:
    """To FRACTAL_NZ and back; a copy to the CPU goes back by itself."""
    nd, nz = 2, 29
    x = values(3, 33, 65).to(dtype)
    cast = torch_npu.npu_format_cast(x.npu(), nz)
    assert torch_npu.get_npu_format(cast) == nz
    assert torch.equal(cast.cpu(), x)
    back = torch_npu.npu_format_cast(cast, nd)
    assert torch_npu.get_npu_format(back) == nd
    assert torch.equal(back.cpu(), x)
    # (N / 16, M / 16, 16, 16): element (17, 18) of the first matrix. Device memory is the host's.
    size = 5 * 3 * 16 * 16 * x.element_size()
    stored = bytearray(ctypes.string_at(cast.data_ptr(), size))
    assert torch.frombuffer(stored, dtype=dtype).view(5, 3, 16, 16)[1, 1, 1, 2] == x[0, 17, 18]


def test_format_cast_where_only_nd_is_allowed() -> None:
    x = values(33, 65).half()
    cast = torch_npu.npu_format_cast(x.npu(), 29)
    assert torch_npu.get_npu_format(cast) == torch_npu.Format.ND
    assert torch.equal(cast.cpu(), x)
