"""Norms, rotary embeddings, SwiGLU, GeGLU and casts of torch_npu on the simulated NPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
import torch_npu
from plain_attention import TOLERANCES, values
from support.tolerance import assert_close
from torch import Tensor

pytestmark = pytest.mark.usefixtures("no_leak")

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
EPSILON = 0.01


def check(
    operator: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    tensors: list[Tensor],
    dtype: torch.dtype,
) -> None:
    """Compares the results and the gradients of all tensors."""
    rounded = [x.to(dtype) for x in tensors]
    exact = [x.double().requires_grad_() for x in rounded]
    given = [x.npu().requires_grad_() for x in rounded]
    expected, actual = plain(*exact), operator(*given)
    assert actual.dtype == dtype
    assert_close("out", actual.cpu(), expected, TOLERANCES[dtype])
    dy = values(*expected.shape, seed=99).to(dtype)
    on_npu = torch.autograd.grad(actual, given, dy.npu())
    for i, y in enumerate(torch.autograd.grad(expected, exact, dy.double())):
        assert_close(f"gradient {i}", on_npu[i].cpu(), y, TOLERANCES[dtype])


def plain_norm(x: Tensor, gamma: Tensor) -> Tensor:
    axes = tuple(range(-gamma.dim(), 0))
    return x / (x.square().mean(axes, keepdim=True) + EPSILON).sqrt() * gamma


@each_dtype
@pytest.mark.parametrize("axes", [1, 2])
def test_rms_norm(axes: int, dtype: torch.dtype) -> None:
    tensors = [values(3, 5, 32), values(5, 32, seed=1) if axes == 2 else values(32, seed=1)]
    check(lambda *given: torch_npu.npu_rms_norm(*given, EPSILON)[0], plain_norm, tensors, dtype)
    x, gamma = (x.to(dtype) for x in tensors)
    _, rstd = torch_npu.npu_rms_norm(x.npu(), gamma.npu(), EPSILON)
    squares = x.double().square().mean(tuple(range(-axes, 0)), keepdim=True)
    assert_close("rstd", rstd.cpu(), (squares + EPSILON).rsqrt(), TOLERANCES[torch.float32])


@each_dtype
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x1, x2 = (values(3, 5, 32, seed=i).to(dtype) for i in (1, 2))
    gamma = values(32, seed=3).to(dtype)
    y, rstd, x = torch_npu.npu_add_rms_norm(x1.npu(), x2.npu(), gamma.npu(), EPSILON)
    assert torch.equal(x.cpu(), x1 + x2)
    expected = plain_norm((x1 + x2).double(), gamma.double())
    assert_close("y", y.cpu(), expected, TOLERANCES[dtype])
    assert rstd.shape == (3, 5, 1)


def turned(x: Tensor, mode: str) -> Tensor:
    """The other coordinates of each rotated pair, with their signs."""
    if mode == "interleave":
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    if mode == "quarter":
        a, b, c, d = x.chunk(4, -1)
        return torch.cat([-b, a, -d, c], -1)
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


@pytest.mark.parametrize("mode", ["half", "interleave"])
@each_dtype
def test_rotary_mul(mode: str, dtype: torch.dtype) -> None:
    def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + turned(x, mode) * sin

    def operator(*given: Tensor) -> Tensor:
        return torch_npu.npu_rotary_mul(*given, mode)

    tensors = [values(2, 5, 3, 64), values(1, 5, 1, 64, seed=1), values(1, 5, 1, 64, seed=2)]
    check(operator, plain, tensors, dtype)


@pytest.mark.parametrize("dim", [-1, 0, 1])
@each_dtype
def test_swiglu(dim: int, dtype: torch.dtype) -> None:
    def plain(x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim)
        return torch.nn.functional.silu(gate) * value

    check(lambda x: torch_npu.npu_swiglu(x, dim=dim), plain, [values(4, 6, 64)], dtype)


@pytest.mark.parametrize("activate_left", [False, True])
@pytest.mark.parametrize(("dim", "approximate"), [(-1, 1), (-1, 0), (0, 1)])
@each_dtype
def test_geglu(dim: int, approximate: int, activate_left: bool, dtype: torch.dtype) -> None:
    how = ["none", "tanh"][approximate]

    def plain(x: Tensor) -> Tensor:
        factor, gated = x.chunk(2, dim)[:: -1 if activate_left else 1]
        return factor * torch.nn.functional.gelu(gated, approximate=how)

    def operator(x: Tensor) -> Tensor:
        y, gelu = torch_npu.npu_geglu(x, dim, approximate, activate_left)
        gated = x.detach().cpu().chunk(2, dim)[0 if activate_left else 1].double()
        expected = torch.nn.functional.gelu(gated, approximate=how)
        assert_close("gelu", gelu.detach().cpu(), expected, TOLERANCES[dtype])
        return y

    check(operator, plain, [values(4, 6, 64)], dtype)


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
