"""Changes of one tensor of a call."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .copies import can_be_read
from .memory import permuted

Random = random.Random
Change = Callable[[Random, Tensor], object]

DTYPES = [
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex32, torch.complex64,
    torch.complex128,
]  # fmt: skip
# So many that no call may loop over them, nor allocate one byte of each.
MANY = (2**40, 2**50, 2**62)
WHOLE = (-1, -2, 0, 1, 7, 100, 127, 2**15, 2**31 - 1, -(2**31), 2**31, 2**62, 2**63 - 1, -(2**63))
NUMBERS = (0.0, -0.0, 1e-30, -1.0, 1e30, torch.inf, -torch.inf, torch.nan)


class Subclass(Tensor):
    """A tensor with a type of its own, and nothing else."""


def _axis(r: Random, x: Tensor) -> int:
    return r.randrange(x.dim()) if x.dim() else 0


def _with_gaps(r: Random, x: Tensor) -> Tensor:
    other = torch.full_like(x, torch.nan if x.is_floating_point() else 1)
    return torch.stack((x, other), -1)[..., 0]


def _with_offset(r: Random, x: Tensor) -> Tensor:
    before = r.randint(1, 9)
    buffer = x.new_zeros(before + x.numel() + r.randint(0, 9))
    return buffer[before : before + x.numel()].view(x.shape).copy_(x)


def _in_rows_apart(r: Random, x: Tensor) -> Tensor:
    """As a column of a wider tensor."""
    axis = _axis(r, x)
    wider = torch.cat((x, x.flip(axis) if x.dim() else x), axis) if x.dim() else x[None]
    return wider.narrow(axis, 0, x.shape[axis]) if x.dim() else wider[0]


def _inference(r: Random, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def _negative(r: Random, x: Tensor) -> Tensor:
    """A view of the negated elements, with which kernels must not be called."""
    return torch._neg_view(x.neg()) if x.is_floating_point() else x.clone()


def _requires_grad(r: Random, x: Tensor) -> Tensor:
    return x.clone().requires_grad_(x.is_floating_point())


# The same elements in another form.
SAME: dict[str, Change] = {
    "gaps": _with_gaps, "transposed": lambda r, x: permuted(x, r), "offset": _with_offset,
    "rows apart": _in_rows_apart, "inference": _inference, "negative view": _negative,
    "requires grad": _requires_grad, "not a leaf": lambda r, x: _requires_grad(r, x).view_as(x),
    "subclass": lambda r, x: x.as_subclass(Subclass),
    "parameter": lambda r, x: nn.Parameter(x, requires_grad=x.is_floating_point()),
    "buffer": lambda r, x: nn.Buffer(x),
}  # fmt: skip


def _quantized(r: Random, x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x.float(), 0.1, 0, r.choice((torch.qint8, torch.quint8)))


def _other_rank(r: Random, x: Tensor) -> Tensor:
    choice = r.randrange(6)
    if choice == 0 or x.dim() == 0:
        return x.unsqueeze(r.randint(0, x.dim()))
    if choice == 1:
        return x.flatten()
    if choice == 2 and x.dim() > 1:
        start = r.randrange(x.dim() - 1)
        return x.flatten(start, start + 1)
    if choice == 3 and x.numel():
        return x.flatten()[r.randrange(x.numel())]
    axis = _axis(r, x)
    return x.select(axis, 0) if x.shape[axis] else x.squeeze()


def _other_size(r: Random, x: Tensor) -> Tensor:
    axis = _axis(r, x)
    size = x.shape[axis] if x.dim() else 1
    choice = r.randrange(5)
    if x.dim() == 0:
        return x.expand(r.randrange(3))
    if choice == 0 or size == 0:
        return x.narrow(axis, 0, 0)
    if choice == 1:
        return x.narrow(axis, 0, 1)
    if choice == 2:
        return torch.cat((x, x.narrow(axis, size - 1, 1)), axis)
    return x.narrow(axis, r.randrange(2), size - 1)


def _many(r: Random, x: Tensor) -> Tensor:
    """Nothing else, with strides of zero."""
    axis = _axis(r, x)
    if not x.numel() or not x.dim():
        return x.clone()
    shape = list(x.shape)
    most = 2**62 // max(1, x.numel() // shape[axis])
    shape[axis] = min(r.choice(MANY), most)
    return x.narrow(axis, 0, 1).expand(shape)


def _expanded(r: Random, x: Tensor) -> Tensor:
    axis = _axis(r, x)
    return x.narrow(axis, 0, 1).expand_as(x) if x.numel() and x.dim() else x.clone()


def _overlapping(r: Random, x: Tensor) -> Tensor:
    strides = [r.choice((stride, stride // 2, 1, 0)) for stride in x.stride()]
    return x.as_strided(x.shape, strides)


def _freed(r: Random, x: Tensor) -> Tensor:
    x = x.clone()
    storage = x.untyped_storage()
    storage.resize_(int(r.choice((0, 0, 0.5, 0.9)) * storage.nbytes()))
    return x


def _one_element(r: Random, x: Tensor) -> Tensor:
    """Another value of one element."""
    x = x.clone()
    if x.numel():
        flat = x.view(-1)
        at = r.randrange(x.numel())
        if x.is_floating_point() or x.dtype == torch.bool:
            flat[at] = r.choice(NUMBERS)
        else:
            limits = torch.iinfo(x.dtype)
            flat[at] = min(max(r.choice(WHOLE), limits.min), limits.max)
    return x


def _sparse(r: Random, x: Tensor) -> Tensor:
    if x.dim() > 1 and r.randrange(2):
        return x.to_sparse_csr() if x.dim() == 2 else x.flatten(1).to_sparse_csr()
    return x.to_sparse()


def _nested(r: Random, x: Tensor) -> Tensor:
    layout = r.choice((torch.strided, torch.jagged))
    return torch.nested.nested_tensor([x if x.dim() else x[None]], layout=layout)


# Other elements, or none.
OTHER: dict[str, Change] = {
    "dtype": lambda r, x: x.to(r.choice(DTYPES)), "quantized": _quantized, "rank": _other_rank,
    "size": _other_size, "many": _many, "expanded": _expanded, "overlapping": _overlapping,
    "freed": _freed, "element": _one_element, "meta": lambda r, x: x.to("meta"), "sparse": _sparse,
    "nested": _nested, "mkldnn": lambda r, x: x.float().to_mkldnn(),
    "fake": lambda r, x: FakeTensorMode().from_tensor(x),
    "zeros": lambda r, x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "list": lambda r, x: x.flatten()[:9].tolist(), "numpy": lambda r, x: x.float().numpy(),
    "in a list": lambda r, x: [x], "size object": lambda r, x: x.shape,
}  # fmt: skip
# Drawn more often, because the rules are about these.
USUAL = ("dtype", "rank", "size", "element", "rank", "size", "element", "size", "element")
NAMES = [*SAME, *OTHER, *USUAL]


def changed(r: Random, x: Tensor) -> tuple[str, object]:
    """A change, and what it makes of a tensor that is left as it is."""
    name = r.choice(NAMES)
    if not can_be_read(x):
        return "same", x
    change = SAME.get(name) or OTHER[name]
    with warnings.catch_warnings():
        # torch warns that some of these tensors are prototypes.
        warnings.simplefilter("ignore")
        try:
            return name, change(r, x)
        except (RuntimeError, NotImplementedError, TypeError):
            # torch has no such form of this tensor.
            return "same", x.clone()
