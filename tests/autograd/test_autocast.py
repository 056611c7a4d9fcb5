"""Operators under autocast cast as scaled_dot_product_attention does: see tests/programs, too."""

from __future__ import annotations

from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.gradients import differentiable_names, outputs_and_gradients
from ascend_attn_check.samples.prompt_flash_attention import PromptCase
from support.autocast import STATISTICS, cast, kept_names
from support.samples import OPERATORS, Sample
from support.tolerance import assert_same_bits
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("no_limits")

CAST = (
    "lightning_indexer", "sparse_flash_attention", "sparse_lightning_indexer_grad_kl_loss",
    "sparse_lightning_indexer_kl_loss_grad", "flash_attention_score", "prompt_flash_attention",
    "fused_infer_attention_score", "sparse_flash_mla",
)  # fmt: skip
HALF = [torch.bfloat16, torch.float16]

each_operator = pytest.mark.parametrize("name", CAST)
each_dtype = pytest.mark.parametrize("dtype", HALF, ids=str)


def mixed(sample: Sample) -> Sample:
    """Every other tensor in float16."""
    names = [
        name for name, x in cast(sample, torch.float16).tensors.items() if x.is_floating_point()
    ]
    changed = {name: sample.tensors[name].half() for name in names[::2] if name not in STATISTICS}
    return sample.replace(**changed)


@each_dtype
@each_operator
def test_inputs_are_cast(name: str, dtype: torch.dtype) -> None:
    sample = OPERATORS[name].make(OPERATORS[name].cases[0], torch.float32)
    for given in (sample, mixed(sample)):
        expected = cast(given, dtype).call(torch.ops.ascend)
        for namespace in (ops, torch.ops.ascend):
            with torch.autocast("cpu", dtype):
                assert_same_bits(given.call(namespace), expected)
        with torch.autocast("cpu", dtype, enabled=False):
            assert_same_bits(sample.call(ops), sample.call(torch.ops.ascend))
            assert sample.call(ops)[0].dtype != dtype
    if OPERATORS[name].gradient:  # the others have no float64
        sample = OPERATORS[name].make(OPERATORS[name].cases[0], torch.float64)
        with torch.autocast("cpu", dtype):
            assert_same_bits(sample.call(ops), sample.call(torch.ops.ascend))


@each_dtype
@pytest.mark.parametrize("name", [name for name in CAST if OPERATORS[name].gradient])
def test_gradients_have_the_dtype_of_their_tensor(name: str, dtype: torch.dtype) -> None:
    sample = OPERATORS[name].make(OPERATORS[name].cases[0], torch.float32)
    names = differentiable_names(sample)

    def call(leaf: Sample) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype):
            return leaf.call(ops)

    outputs, gradients = outputs_and_gradients(sample, call=call)
    rounded, expected = outputs_and_gradients(cast(sample, dtype), call=lambda leaf: leaf.call(ops))
    assert_same_bits(outputs, rounded)
    for argument, actual, other in zip(names, gradients, expected, strict=True):
        assert actual.dtype == sample.tensors[argument].dtype
        assert_same_bits((actual.to(other.dtype),), (other,))


def test_quantised_inputs_are_left_alone() -> None:
    sample = OPERATORS["prompt_flash_attention"].make(PromptCase(inputs="int8"), torch.float16)
    assert sample.tensors["query"].dtype == torch.int8
    with torch.autocast("cpu", torch.bfloat16):
        out = sample.call(ops)
    assert_same_bits(out, sample.call(ops))


def test_what_is_not_cast() -> None:
    """Besides gradients, which autograd calls, what merges results, writes to a cache or reads
    int8."""
    others = {name for name in OPERATORS if name not in CAST and not name.endswith("_grad")}
    of_int8 = {"quant_lightning_indexer", "kv_quant_sparse_flash_attention"}
    assert others == {"attention_update", "scatter_pa_kv_cache_", *of_int8}
    sample = OPERATORS["attention_update"].small_sample()
    expected = sample.call(ops)
    with torch.autocast("cpu", torch.float16):
        assert_same_bits(sample.call(ops), expected)


def test_slopes_and_biases() -> None:
    x = torch.randn(1, 8, 2, 16)
    options = {"num_heads": 2, "layout": "BSND", "scale_value": 0.25}

    def out(pse_shift: Tensor, x: Tensor, pse_type: int) -> Tensor:
        options["pse_type"] = pse_type
        return ops.flash_attention_score(x, x, x, pse_shift=pse_shift, **options)[0]

    slopes, bias = torch.rand(2) + 0.01, torch.randn(1, 2, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        with_slopes, with_bias = out(slopes, x, 2), out(bias, x, 1)
    assert torch.equal(with_slopes, out(slopes, x.bfloat16(), 2))
    assert torch.equal(with_bias, out(bias.bfloat16(), x.bfloat16(), 1))


class Received(TorchDispatchMode):
    """Keeps the dtypes of the tensors that an operator of ours receives, by argument."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "ascend":
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            self.dtypes = {k: x.dtype for k, x in given.items() if isinstance(x, Tensor)}
        return func(*args, **kwargs)


@each_operator
def test_statistics_and_scales_keep_their_dtype(name: str) -> None:
    """Under autocast, the operator receives statistics and scales as they were passed."""
    samples = [OPERATORS[name].make(case, torch.float32) for case in OPERATORS[name].cases]
    # One for each set of tensors.
    for sample in {tuple(x.tensors): x for x in samples}.values():
        with torch.autocast("cpu", torch.bfloat16), Received() as received:
            sample.call(torch.ops.ascend)
        kept = kept_names(sample)
        expected = {
            key: x.dtype if key in kept or x.dtype != torch.float32 else torch.bfloat16
            for key, x in sample.tensors.items()
        }
        assert received.dtypes == expected, sample.id


class Casts(TorchDispatchMode):
    """Counts those of tensors of one shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and args[0].shape == self.shape
        return func(*args, **(kwargs or {}))


def test_weights_are_cast_once() -> None:
    """The cast of a leaf is kept within the region, as for torch's own operators."""
    key = torch.randn(1, 4, 1, 16, requires_grad=True)
    query, weights = torch.randn(1, 4, 2, 16), torch.randn(1, 4, 2)
    with Casts(key.shape) as casts, torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            ops.lightning_indexer(query, key, weights, sparse_count=2)
    assert casts.count == 1


def test_a_value_that_is_the_key_stays_the_key() -> None:
    """As the device wants it."""
    query, key = torch.randn(1, 4, 2, 16), torch.randn(1, 4, 1, 16)
    indices = torch.zeros(1, 4, 1, 1, dtype=torch.int32)
    with Casts(key.shape) as casts, torch.autocast("cpu", torch.bfloat16):
        ops.sparse_flash_attention(query, key, key, indices, scale_value=0.25)
    assert casts.count == 1


@each_operator
def test_compiled(name: str) -> None:
    sample = OPERATORS[name].make(OPERATORS[name].cases[0], torch.float32)

    def function() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return sample.call(ops)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(), function())
