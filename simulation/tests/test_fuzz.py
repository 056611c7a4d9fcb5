"""Random calls of torch's operators: an NPU tensor gives what a CPU tensor of its layout gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.simulated_npu import once
from torch import Tensor

pytestmark = once

CALLS, SEEDS = 200, 10

DTYPES = [
    torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.int64,
    torch.int32, torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip

# How a tensor lies in its memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x, "transposed": lambda x: x.transpose(0, -1),
    "every second": lambda x: x[..., ::2], "behind others": lambda x: x[1:],
    "expanded": lambda x: x[:1].expand(3, *x.shape[1:]), "without elements": lambda x: x[:0],
    "one element": lambda x: x.flatten()[1],
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=-1) if x.dim() > 1 else x[::3],
}  # fmt: skip

UNARY = [
    "abs", "neg", "exp", "tanh", "sigmoid", "sqrt", "sign", "floor", "round", "sin", "erf", "relu",
    "logical_not", "isnan", "isfinite", "reciprocal", "square", "log1p", "clone", "trunc", "real",
    "conj", "nan_to_num", "bitwise_not", "positive", "tril", "nonzero", "unique", "t",
]  # fmt: skip
BINARY = [
    "add", "sub", "mul", "div", "maximum", "minimum", "eq", "lt", "ne", "ge", "fmod", "remainder",
    "atan2", "floor_divide", "logical_and", "bitwise_or", "hypot", "copysign", "pow", "matmul",
    "addcmul", "lerp",
]  # fmt: skip
OVER_A_DIM = [
    "sum", "mean", "amax", "argmin", "prod", "all", "any", "logsumexp", "cumsum", "softmax", "sort",
    "var", "flip", "unbind", "squeeze", "unsqueeze",
]  # fmt: skip
IN_PLACE = ["add_", "mul_", "sub_", "copy_", "clamp_min_", "fill_", "zero_", "tanh_", "abs_"]
WITH_OUT = ["add", "mul", "maximum", "div", "sub", "atan2", "eq"]


def rows(x: Tensor) -> Tensor:
    return torch.tensor([0, 0, 1], device=x.device)


OTHERS: dict[str, Callable[..., Any]] = {
    "cat": lambda x, y, z, dim, number: torch.cat([x, y, x], dim),
    "stack": lambda x, y, z, dim, number: torch.stack([x, y], dim),
    "where": lambda x, y, z, dim, number: torch.where(x > 0, y, z),
    "foreach": lambda x, y, z, dim, number: torch._foreach_add([x, y], number),
    "foreach in place": lambda x, y, z, dim, number: torch._foreach_mul_([x, y], [y, z]),
    "masked_fill_": lambda x, y, z, dim, number: x.masked_fill_(y > 0, number),
    "cumsum_": lambda x, y, z, dim, number: x.cumsum_(dim),
    "select": lambda x, y, z, dim, number: x.select(dim, 0) + 1,
    "index": lambda x, y, z, dim, number: x[rows(x)],
    "index on the CPU": lambda x, y, z, dim, number: x[torch.tensor([0, -1])],
    "mask": lambda x, y, z, dim, number: x[x > 0],
    "assign": lambda x, y, z, dim, number: x.__setitem__(y > 0, number),
    "roll": lambda x, y, z, dim, number: x.roll(1, dim),
    "repeat": lambda x, y, z, dim, number: x.repeat(2, *[1] * x.dim()),
    "reshape": lambda x, y, z, dim, number: x.reshape(-1),
    "topk": lambda x, y, z, dim, number: x.topk(1, dim),
    "to": lambda x, y, z, dim, number: [x.to(t) for t in (torch.half, torch.int32, torch.bool)],
    "channels last": lambda x, y, z, dim, number: x.contiguous(memory_format=torch.channels_last),
    "norm": lambda x, y, z, dim, number: torch.linalg.vector_norm(x, dim=dim),
    "einsum": lambda x, y, z, dim, number: torch.einsum("...i,...i->...", x, y),
    "index_put_": lambda x, y, z, dim, number: x.index_put_((rows(x),), y[:1], accumulate=True),
    "index_select": lambda x, y, z, dim, number: x.index_select(dim, rows(x)),
    "scatter_add_": lambda x, y, z, dim, number: x.scatter_add_(dim, torch.zeros_like(x).long(), y),
    "unfold": lambda x, y, z, dim, number: x.unfold(dim, 2, 1).clone(),
    "item": lambda x, y, z, dim, number: x.flatten()[:1].sum().item(),
}

Run = Callable[[list[Tensor]], Any]


def random_call(rng: random.Random) -> tuple[str, Run]:
    """Its name, and what it does with three tensors."""
    kind = rng.choice(["unary", "binary", "number", "dim", "in place", "out", "other"])
    dim, number = rng.randrange(-1, 3), rng.choice([0, 1, 2, -3, 0.5, True])
    runs: dict[str, tuple[list[str], Callable[[str], Run]]] = {
        "unary": (UNARY, lambda name: lambda x: getattr(torch, name)(x[0])),
        "binary": (BINARY, lambda name: lambda x: getattr(torch, name)(*x[: operands(name)])),
        "number": (BINARY[:-3], lambda name: lambda x: getattr(torch, name)(x[0], number)),
        "dim": (OVER_A_DIM, lambda name: lambda x: getattr(x[0], name)(dim)),
        "in place": (IN_PLACE, lambda name: lambda x: in_place(name, x, number)),
        "out": (WITH_OUT, lambda name: lambda x: getattr(torch, name)(x[0], x[1], out=x[2])),
        "other": (list(OTHERS), lambda name: lambda x: OTHERS[name](*x, dim, number)),
    }
    names, run = runs[kind]
    name = rng.choice(names)
    return f"{name}, {kind}, {dim}, {number}", run(name)


def operands(name: str) -> int:
    return 3 if name in ("addcmul", "lerp") else 2


def in_place(name: str, x: list[Tensor], number: float) -> Tensor:
    change = getattr(x[0], name)
    if name in ("zero_", "tanh_", "abs_"):
        return change()
    return change(number if name in ("clamp_min_", "fill_") else x[1])


def random_memory(rng: random.Random, generator: torch.Generator) -> Tensor:
    dtype = rng.choice(DTYPES)
    size = rng.choice([(4, 6), (5,), (3, 4, 6), (2, 3, 4, 4), (4, 4)])
    values = torch.randn(*size, generator=generator) * 4
    return values.to(dtype) if dtype != torch.uint8 else values.abs().to(dtype)


def outcome(run: Run, tensors: list[Tensor]) -> Any:
    try:
        return run(tensors)
    except Exception as error:
        return type(error)


def described(result: Any) -> Any:
    """Returns values on the CPU, with the strides of the original tensors."""
    if isinstance(result, Tensor):
        return result.cpu(), result.stride()
    if isinstance(result, (list, tuple)):
        return [described(item) for item in result]
    return result


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_calls(seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    computed = 0
    for _ in range(CALLS):
        name, run = random_call(rng)
        memory = [random_memory(rng, generator) for _ in range(3)]
        layouts = [rng.choice(list(LAYOUTS)) for _ in memory]
        if rng.random() < 0.6:  # that fit together
            memory = [memory[0].clone() for _ in memory]
            layouts = [layouts[0]] * 3
        what = f"{name}: {layouts}, {[(tuple(x.shape), x.dtype) for x in memory]}"
        there = [x.npu() for x in memory]
        expected, actual = (
            outcome(run, [LAYOUTS[layout](x) for layout, x in zip(layouts, place, strict=True)])
            for place in (memory, there)
        )
        if isinstance(expected, type):
            assert actual is expected, what
        else:
            computed += 1
            assert_same(described(actual), described(expected), what)
        # Also what a view does not show.
        assert_same([x.cpu() for x in there], memory, what)
    assert computed > CALLS / 2


def assert_same(actual: Any, expected: Any, what: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )
