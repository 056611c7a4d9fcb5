"""Sequence lengths as a list or as a tensor, in every public function that takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import reference
from ascend_attn_ops.check.samples.sparse import ALL_TOKENS, LENGTHS, SparseCase
from support.samples import OPERATORS, SPARSE_OPERATORS, Operator, Recipe, Sample, as_tuple
from support.tolerance import assert_same_bits
from torch import Tensor

np = pytest.importorskip("numpy", reason="numpy is not installed")

pytestmark = pytest.mark.usefixtures("no_limits")


def has_lengths(recipe: Recipe) -> bool:
    arguments = recipe.make(torch.bfloat16).arguments
    return any(arguments.get(name) is not None for name in LENGTHS)


# One sample of each layout.
SAMPLES = list(
    {
        (operator.name, recipe.layout): recipe
        for operator in OPERATORS.values()
        if not operator.in_place
        for recipe in operator.recipes
        if has_lengths(recipe)
    }.values()
)

each_sample = pytest.mark.parametrize("recipe", SAMPLES, ids=lambda recipe: recipe.id)


def as_list(lengths: Any) -> Any:
    return lengths.tolist() if isinstance(lengths, Tensor) else lengths


def as_tensor(lengths: Any) -> Any:
    return torch.tensor(lengths, dtype=torch.int32) if isinstance(lengths, list) else lengths


def as_tuple_of_numbers(lengths: Any) -> Any:
    return lengths if lengths is None else tuple(as_list(lengths))


def converted(sample: Sample, convert: Callable[[Any], Any]) -> Sample:
    given = {name: sample.arguments[name] for name in LENGTHS if name in sample.arguments}
    return sample.given(**{name: convert(lengths) for name, lengths in given.items()})


def test_every_operator_with_lengths_is_here() -> None:
    with_lengths = {
        name
        for name in OPERATORS
        if any(x.name == LENGTHS[0] for x in OPERATORS[name].overload._schema.arguments)
    }
    assert {recipe.operator.name for recipe in SAMPLES} == with_lengths


@each_sample
@pytest.mark.parametrize("convert", [as_list, as_tensor, as_tuple_of_numbers])
def test_lists_and_tensors(recipe: Recipe, convert: Callable[[Any], Any]) -> None:
    sample = recipe.make(torch.bfloat16)
    assert_same_bits(converted(sample, convert).call(ops), sample.call(torch.ops.ascend))


@pytest.mark.parametrize("operator", SPARSE_OPERATORS, ids=lambda x: x.name)
@pytest.mark.parametrize("left_out", LENGTHS)
def test_lengths_of_one_side(operator: Operator, left_out: str) -> None:
    sample = operator.make(ALL_TOKENS[left_out], torch.bfloat16)
    one_side = sample.replace(**{left_out: None})
    assert_same_bits(one_side.call(torch.ops.ascend), sample.call(torch.ops.ascend))


def test_attention_passes_over_keys_behind_the_length() -> None:
    """Its gradients refuse them: samples/sparse_errors.py."""
    case = SparseCase(s=(9, 17), lengths=((9, 4), (11, 6)), pattern="future", k=8)
    sample = OPERATORS["sparse_flash_attention"].make(case, torch.float64)
    assert int(sample.arguments["sparse_indices"][0].max()) >= 11
    for actual, expected in zip(sample.call(ops), sample.call(reference), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    "recipe",
    [r for r in SAMPLES if "lightning" in r.operator.name or "sparse" in r.operator.name],
    ids=lambda recipe: recipe.id,
)
def test_lists_are_compiled(recipe: Recipe) -> None:
    sample = converted(recipe.make(torch.bfloat16), as_list)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda: as_tuple(sample.call(ops)), backend="aot_eager", fullgraph=True
    )
    assert_same_bits(compiled(), sample.call(ops))


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([1.5, 4], TypeError, r"expected whole numbers, .* got \[1.5, 4\]"),
        (["2", "4"], TypeError, r"expected whole numbers, .* got \['2', '4'\]"),
        ([2, 2**40], ValueError, "expected lengths of at most 2147483647, got "),
    ],
)
def test_what_is_no_list_of_lengths(lengths: Any, error: type[Exception], message: str) -> None:
    x = torch.ones(4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(
        error, match=f"ascend::lightning_indexer: actual_seq_lengths_query: {message}"
    ):
        ops.lightning_indexer(
            x, x[:, :1], x[..., 0], layout="TND",
            actual_seq_lengths_query=lengths, actual_seq_lengths_key=[2, 4],
        )  # fmt: skip


@pytest.mark.parametrize(
    "lengths",
    [
        [2.0, 4], torch.tensor([2.0, 4.0]), torch.tensor([[2, 4]]), torch.tensor(4),
        np.array([[2, 4]]),
        torch.quantize_per_tensor(torch.tensor([2.0, 4.0]), 1.0, 0, torch.qint8),
    ],
    ids=["floats in a list", "floats in a tensor", "two axes", "no axis", "array",
         "quantized"],
)  # fmt: skip
def test_what_is_no_list_of_lengths_on_the_host(lengths: Any) -> None:
    x = torch.ones(4, 2, 16, dtype=torch.bfloat16)
    wrong = "ascend::flash_attention_score: actual_seq_lengths_query: expected whole numbers"
    with pytest.raises(TypeError, match=wrong):
        ops.flash_attention_score(
            x, x, x, num_heads=2, layout="TND",
            actual_seq_lengths_query=lengths, actual_seq_lengths_key=[2, 4],
        )  # fmt: skip


def test_a_range_is_a_sequence() -> None:
    x = torch.ones(4, 2, 16, dtype=torch.bfloat16)
    arguments = (x, x[:, :1], x[..., 0])
    options = {"layout": "TND", "actual_seq_lengths_key": [1, 2, 3, 4], "sparse_count": 2}
    expected = ops.lightning_indexer(*arguments, actual_seq_lengths_query=[1, 2, 3, 4], **options)
    assert_same_bits(
        ops.lightning_indexer(*arguments, actual_seq_lengths_query=range(1, 5), **options),
        expected,
    )


def test_dropout_of_packed_sequences_reads_either() -> None:
    x = torch.randn(6, 2, 16, dtype=torch.bfloat16)

    def out(lengths: Any) -> Tensor:
        return ops.flash_attention_score(
            x, x, x, num_heads=2, layout="TND", dropout_p=0.5,
            generator=torch.Generator().manual_seed(0),
            actual_seq_lengths_query=lengths, actual_seq_lengths_key=lengths,
        )[0]  # fmt: skip

    assert torch.equal(out([2, 6]), out(torch.tensor([2, 6])))
