"""Operators of torch that NPUs compute and CPUs do not, and layers that need more than those."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch_npu
from support.simulated_npu import captured
from torch import Tensor, nn


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("bins", "low", "high"), [(10, 0, 10), (7, -3, 40), (5, 0, 0), (100, 0, 1)]
)
def test_histogram_of_integers(dtype: torch.dtype, bins: int, low: int, high: int) -> None:
    x = torch.randint(0, 60, (500,), generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = torch.histc(x.double(), bins, low, high).to(dtype)
    found = torch.histc(x.npu(), bins, low, high)
    assert torch.equal(found.cpu(), expected)
    out = torch.empty(0, dtype=dtype, device="npu")
    assert torch.equal(torch.histc(x.npu(), bins, low, high, out=out).cpu(), expected)


def test_a_histogram_is_exact_beyond_float() -> None:
    """Every integer has its own bin, although float32 cannot distinguish neighbouring integers."""
    x = torch.arange(2**30, 2**30 + 8, dtype=torch.int32)
    found = torch.histc(x.npu(), 8, 2**30, 2**30 + 8)
    assert found.cpu().tolist() == [1] * 8


def test_a_histogram_of_floats_is_that_of_the_cpu() -> None:
    x = torch.rand(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(torch.histc(x.npu(), 9, 0.1, 0.7).cpu(), torch.histc(x, 9, 0.1, 0.7))
    with pytest.raises(RuntimeError, match="bins must be > 0"):
        torch.histc(x.npu().int(), 0)


def results(layer: nn.Module, inputs: tuple[Any, ...], device: str) -> list[Tensor]:
    """Outputs, and the gradients of the parameters and of the first input."""
    layer = copy.deepcopy(layer).to(device)
    first = inputs[0].clone().to(device).requires_grad_()
    outputs = layer(first, *torch.utils._pytree.tree_map(lambda x: x.to(device), inputs[1:]))
    flat = [x for x in torch.utils._pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    torch.stack([(x.float() * x.float()).sum() for x in flat]).sum().backward()
    gradients = [x.grad for x in (first, *layer.parameters())]
    return [x.detach().cpu() for x in (*flat, *gradients) if x is not None]


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(0)


OPTIONS: list[dict[str, Any]] = [
    {}, {"bias": False}, {"num_layers": 2, "bidirectional": True, "batch_first": True},
]  # fmt: skip
STATE = [torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
# Layers, their options, and the states that they begin with.
RECURRENT: list[tuple[type[nn.Module], dict[str, Any], list[Any]]] = [
    *((layer, options, []) for layer in (nn.LSTM, nn.GRU, nn.RNN) for options in OPTIONS),
    (nn.LSTM, {}, [tuple(STATE)]), (nn.GRU, {}, STATE[:1]), (nn.LSTMCell, {}, []),
    (nn.GRUCell, {}, []),
]  # fmt: skip


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(("layer", "options", "state"), RECURRENT)
def test_recurrent_layers(
    layer: type[nn.Module], options: dict[str, Any], state: list[Any]
) -> None:
    module, x = layer(8, 16, **options), torch.randn(5, 3, 8)
    inputs = (x[0] if "Cell" in layer.__name__ else x, *state)
    expected, found = (results(module, inputs, device) for device in ("cpu", "npu"))
    assert len(found) > len(list(module.parameters()))
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=2e-6, atol=2e-6 * z.abs().max().item())


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_in_half_precision(layer: type[nn.Module]) -> None:
    module = layer(8, 16)
    x = torch.randn(5, 3, 8)
    expected = module(x)[0]
    half = copy.deepcopy(module).half().npu()
    torch.testing.assert_close(half(x.half().npu())[0].float().cpu(), expected, rtol=0, atol=4e-3)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_packed_sequences(layer: type[nn.Module]) -> None:
    module, x = layer(8, 16), torch.randn(5, 3, 8)

    def run(device: str) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.to(device), torch.tensor([5, 3, 1]))
        out, _ = copy.deepcopy(module).to(device)(packed)
        if torch.__version__ < (2, 13) and out.data.dim() == 1:
            pytest.skip(f"torch_npu {torch_npu.__version__} flattens what its own LSTM returns")
        return nn.utils.rnn.pad_packed_sequence(out)[0].detach().cpu()

    torch.testing.assert_close(run("npu"), run("cpu"), rtol=2e-6, atol=2e-6)


def encoder(training: bool) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2, nn.LayerNorm(32)).train(training)


PADDING = torch.tensor([[False, False, False, True, True], [False] * 5, [False] * 4 + [True]])
LEFT = PADDING.flip(1)  # on the left: no nested tensors


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("padding", [None, PADDING, LEFT], ids=["none", "right", "left"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoders(training: bool, padding: Tensor | None) -> None:
    """Without training, torch makes one nested tensor of a padded batch."""
    module, x = encoder(training), torch.randn(3, 5, 32)

    def run(device: str) -> Tensor:
        mask = None if padding is None else padding.to(device)
        with torch.set_grad_enabled(training):
            y: Tensor = copy.deepcopy(module).to(device)(x.to(device), src_key_padding_mask=mask)
        if training:
            y.sum().backward()
        return y.detach().cpu()

    found, expected = run("npu"), run("cpu")
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
    if padding is PADDING and not training:
        assert (found[PADDING] == 0).all()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors() -> None:
    x = torch.arange(30.0).view(2, 3, 5)
    kept = torch.tensor([[True, True, False], [True, True, True]])
    nested = torch._nested_tensor_from_mask(x.npu(), kept.npu())
    assert nested.is_nested
    assert nested.device.type == "npu"
    doubled = torch._nested_tensor_from_mask((2 * x).npu(), kept.npu())
    padded = (nested + doubled).to_padded_tensor(-1.0)
    assert torch.equal(padded.cpu(), torch.where(kept[..., None], 3 * x, -1.0))


@captured
@pytest.mark.usefixtures("seeded")
def test_a_graph_repeats_a_cell() -> None:
    cell, x = nn.GRUCell(8, 16).npu(), torch.randn(3, 8).npu()
    graph = torch.npu.NPUGraph()
    with torch.no_grad():
        with torch.npu.graph(graph):
            y = cell(x)
        x.copy_(torch.randn(3, 8))
        graph.replay()
        assert torch.equal(y, cell(x))
