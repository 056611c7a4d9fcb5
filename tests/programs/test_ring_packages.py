"""Packages of ring attention run unmodified through `flash_attn.enable()`, on four ranks.

`make test-all` installs them: yunchang and ring_flash_attn.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from unittest.mock import patch

import plain
import pytest
import torch
from ascend_attn_ops import flash_attn
from support.processes import on_ranks
from torch import Tensor
from torch.distributed import ProcessGroup

HEADS, KEY_HEADS, SIZE, LENGTH = 4, 2, 64, 32
Shard = Callable[[Tensor], Tensor]
# A call, the part of a text that a rank has, and the ends of the sequences of a pack.
Mode = tuple[Callable[..., Tensor], Shard, list[int] | None]


def check(call: Callable[..., Tensor], shard: Shard, ends: list[int] | None = None) -> None:
    """A call on the shards of a text, forward and backward, against all of it in float64."""
    torch.manual_seed(0)
    batch = () if ends else (1,)
    tensors = [
        torch.randn(*batch, LENGTH, heads, SIZE, dtype=torch.bfloat16)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    mine = [shard(x).clone().requires_grad_() for x in tensors]
    whole = [x.double().requires_grad_() for x in tensors]
    out = call(*mine)
    expected = plain.packed_attention(*whole, ends) if ends else plain.attention(*whole)
    out.float().square().sum().backward()
    expected.square().sum().backward()
    plain.assert_close(out, shard(expected), torch.bfloat16, "out")
    for name, x, y in zip("qkv", mine, whole, strict=True):
        plain.assert_close(x.grad, shard(y.grad), torch.bfloat16, f"gradient of {name}")


def ring_modes(rank: int, ranks: int) -> Iterator[Mode]:
    # Its part for transformers imports a name that transformers 5 lacks.
    adapters = ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    with patch.dict(sys.modules, {adapters.__name__: adapters}):
        import ring_flash_attn as ring

    def zigzag(x: Tensor) -> Tensor:
        parts = x.chunk(2 * ranks, 1)
        return torch.cat((parts[rank], parts[-1 - rank]), 1)

    def part(x: Tensor) -> Tensor:
        return x.chunk(ranks, -3)[rank]

    causal = {"causal": True}
    yield lambda *x: ring.ring_flash_attn_func(*x, **causal), part, None
    yield lambda *x: ring.zigzag_ring_flash_attn_func(*x, **causal), zigzag, None
    yield lambda *x: ring.stripe_flash_attn_func(*x, **causal), lambda x: x[:, rank::ranks], None
    ends = [8, 20, LENGTH]
    lengths = torch.tensor([0, *ends], dtype=torch.int32)
    *cu_seqlens, local_keys = ring.llama3_flash_attn_prepare_cu_seqlens(lengths, True, rank, ranks)
    yield (
        lambda *x: ring.llama3_flash_attn_varlen_func(
            *x, *cu_seqlens, heads_k_stride=1, local_k_slice=local_keys, **causal
        ),
        part,
        ends,
    )


def hybrid_modes(rank: int, ranks: int) -> Iterator[Mode]:
    import yunchang
    from yunchang.comm import EXTRACT_FUNC_DICT
    from yunchang.kernels import AttnType

    yunchang.set_seq_parallel_pg(1, ranks, rank, ranks)
    for mode in ("basic", "zigzag", "strip"):
        layer = yunchang.LongContextAttention(ring_impl_type=mode, attn_type=AttnType.FA)

        def shard(x: Tensor, mode: str = mode) -> Tensor:
            return EXTRACT_FUNC_DICT[mode](x, rank, world_size=ranks, rd=ranks, ud=1)

        yield lambda *x, layer=layer: layer(*x, causal=True), shard, None


def in_all_modes(group: ProcessGroup, package: str) -> None:
    flash_attn.enable()
    try:
        modes = {"ring_flash_attn": ring_modes, "yunchang": hybrid_modes}[package]
        for call, shard, ends in modes(group.rank(), group.size()):
            check(call, shard, ends)
    finally:
        flash_attn.disable()


@pytest.mark.parametrize("package", ["ring_flash_attn", "yunchang"])
def test_package(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-all installs it")
    on_ranks(4, in_all_modes, package)
