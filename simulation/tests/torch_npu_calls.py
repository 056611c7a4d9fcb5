"""Calls of torch_npu's operators, on the NPU and by ascend_attn_ops.torch_npu on the CPU."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops
import pytest
import torch
import torch_npu
from ascend_attn_ops._core.sparse_modes import compressed_mask
from ascend_attn_ops.torch_npu import enable
from support.tolerance import Tolerance, assert_close
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

enable()

# Half types round the probabilities, which the sums then carry.
TOLERANCES = {
    torch.float16: Tolerance(rtol=2**-9, of_largest=2**-9),
    torch.bfloat16: Tolerance(rtol=2**-7, of_largest=2**-7),
    torch.float32: Tolerance(rtol=1e-5, of_largest=1e-5),
}
# The operators of _v3 take these on the host.
LENGTHS = ("actual_seq_qlen", "actual_seq_kvlen")
SCALE = 0.25
HALF = [torch.float16, torch.bfloat16]


def takes(operator: str, argument: str = "") -> pytest.MarkDecorator:
    """Skips a test of an operator, or of an argument, that an older torch_npu does not have."""
    found = getattr(torch.ops.npu, operator, None)
    names = [x.name for x in found.default._schema.arguments] if found else []
    return pytest.mark.skipif(
        not found or (argument != "" and argument not in names),
        reason=f"torch_npu {torch_npu.__version__} has no {operator} {argument}",
    )


def values(*shape: int, seed: int = 0) -> Tensor:
    """Returns random float64 values, so that every dtype rounds the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


Results = tuple[list[Tensor], list[Tensor]]


def run(operator: str, device: str, arguments: Any, options: dict[str, Any]) -> Results:
    """The outputs, but empty ones and seeds, and the gradients of the first in floating point."""
    moved: dict[int, Tensor] = {}  # a value may be the key

    def move(x: Tensor) -> Tensor:
        if id(x) not in moved:
            moved[id(x)] = x.detach().to(device).requires_grad_(x.requires_grad)
        return moved[id(x)]

    on_host = LENGTHS if operator.endswith("_v3") else ()
    kept = {name: x for name, x in options.items() if name in on_host}
    given = tree_map_only(Tensor, move, (arguments, {**options, **dict.fromkeys(kept)}))
    with ascend_attn_ops.limits(None):
        results = getattr(torch_npu, operator)(*given[0], **{**given[1], **kept})
        outputs = [x for x in tree_leaves(results) if isinstance(x, Tensor)]
        outputs = [x for x in outputs if x.numel() and x.dtype != torch.int64]
        leaves = [x for x in moved.values() if x.requires_grad]
        gradients: Any = ()
        if leaves:
            out = next(x for x in outputs if x.is_floating_point())
            dy = values(*out.shape, seed=9).to(out.dtype).to(device)
            gradients = torch.autograd.grad(out, leaves, dy)
    return [x.detach().cpu() for x in outputs], [x.cpu() for x in gradients]


def check(operator: str, *arguments: Any, **options: Any) -> None:
    """Both give the same results, and the same gradients of tensors that want one."""
    actual, expected = (run(operator, x, arguments, options) for x in ("npu", "cpu"))
    assert expected[0]
    for i, (x, y) in enumerate(zip(actual[0], expected[0], strict=True)):
        assert x.dtype == y.dtype
        # Integers select keys.
        tolerance = TOLERANCES.get(x.dtype, Tolerance(rtol=0))
        assert_close(f"output {i}", x, y, tolerance)
    coarsest = max(TOLERANCES.get(x.dtype, Tolerance(0)).rtol for x in expected[0])
    for i, (x, y) in enumerate(zip(actual[1], expected[1], strict=True)):
        assert_close(f"gradient {i}", x, y, Tolerance(coarsest, coarsest))


def mask(mode: int) -> Tensor:
    return compressed_mask(mode, torch.device("cpu"))


def paged(tensors: list[Tensor], form: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Caches of (B, N, S, D) in blocks of 16, in an order of their own, and the options beside."""
    caches = []
    for x in tensors:
        per_batch = -(-x.size(2) // 16)
        room = torch.nn.functional.pad(x, (0, 0, 0, per_batch * 16 - x.size(2)))
        blocks = room.unflatten(2, (per_batch, 16)).transpose(1, 2).flatten(0, 1)
        order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
        cache = torch.empty_like(blocks)
        cache[order] = blocks
        if form == "BBH":
            cache = cache.transpose(1, 2).flatten(2)
        elif form == "BBND":
            cache = cache.transpose(1, 2).contiguous()
        elif form == "NZ":
            cache = cache.unflatten(3, (-1, 16)).transpose(2, 3).contiguous()
        caches.append(cache)
    return caches, {"block_table": order.view(-1, per_batch).int()}
