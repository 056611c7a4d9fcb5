"""DTensors: whatever their placements, the operators give what one process gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dtensor_cases
import dtensor_rules
import pytest
import torch
from ascend_attn_ops.distributed import enable_dtensor
from ascend_attn_ops.distributed.dtensor import LINES, packed_lengths
from dtensor_cases import LARGEST_ERROR
from support import fresh, registered
from support.processes import on_ranks
from support.samples import OPERATORS
from support.turns import by_turns, nightly
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.torch_version import TorchVersion

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.10", reason=f"enable_dtensor() refuses torch {torch.__version__}"
)

COMPUTING = [x.name for x in OPERATORS.values() if x.takes_dtensors and not x.in_place]
DENSE = [x for x in COMPUTING if x.startswith(("flash", "prompt", "fused"))]
SPARSE = [x for x in COMPUTING if x not in DENSE and x != "attention_update"]
BY_TOKENS = [x for x in SPARSE if x != "sparse_lightning_indexer_kl_loss_grad"]
BY_HEADS = [x for x in BY_TOKENS if not x.startswith(("lightning", "quant"))]


def on_four(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function on four ranks, and return what it returns on each."""
    return on_ranks(4, dtensor_cases.without_group, function, *args)


# By the axis that each mesh dimension shards.
PLACEMENTS = [
    ("2", "B", SPARSE), ("2", "B", DENSE), ("4", "S", BY_TOKENS), ("4", "N", BY_HEADS + DENSE),
    ("2x2", "BN", DENSE), ("2x2", "NB", BY_HEADS), ("2x2", "BS", BY_TOKENS),
    ("2x2", "SS", ["sparse_flash_attention"]), ("2x2", "SN", BY_HEADS),
    ("2", "A", ["attention_update"]), ("2x2", "B-", SPARSE + DENSE),
]  # fmt: skip


# Each with a third of the samples, in quarters.
QUARTERS = [
    (*placements, slice(index % 3 + 3 * quarter, None, 12))
    for index, placements in enumerate(PLACEMENTS)
    for quarter in range(4)
]


@by_turns(6)
@pytest.mark.parametrize("case", QUARTERS, ids=lambda x: f"{x[0]}-{x[1]}-{x[2][0]}-{x[3].start}")
def test_results_and_gradients_of_one_process(case: tuple[str, str, list[str], slice]) -> None:
    mesh, kind, operators, part = case
    sizes = [int(size) for size in mesh.split("x")]
    expected = {
        name
        for name in operators
        for recipe in OPERATORS[name].recipes[part]
        if not dtensor_cases.unseen(recipe, kind)
        and dtensor_cases.divides(kind, dtensor_cases.sample_of(recipe, kind, sizes), sizes)
    }
    for worst in on_four(dtensor_cases.check, *case):
        assert worst.keys() == expected
        for name, (error, sample_id) in worst.items():
            assert error <= LARGEST_ERROR, (name, sample_id)


def test_a_mask_of_packed_sequences_is_sharded_with_its_heads() -> None:
    recipes = OPERATORS["flash_attention_score"].recipes
    index = next(i for i, x in enumerate(recipes) if "-TND-" in x.id and "maskBN" in x.id)
    part = slice(index, index + 1)
    for worst in on_four(dtensor_cases.check, "2x2", "BN", ["flash_attention_score"], part):
        assert all(error <= LARGEST_ERROR for error, _ in worst.values())


@pytest.mark.parametrize("operator", ["flash_attention_score", "sparse_flash_attention"])
@pytest.mark.parametrize(("mesh", "axes"), [("4", "N"), ("2x2", "BN")])
def test_gradients_of_statistics(operator: str, mesh: str, axes: str) -> None:
    errors = on_four(dtensor_cases.gradients_of_statistics, mesh, axes, operator)
    assert max(errors) <= LARGEST_ERROR


@pytest.mark.parametrize(
    ("mesh", "placements", "batch"),
    [("4", "N", 1), ("2", "S", 1), ("4", "B", 4), ("2x2", "BN", 2), ("2x2", "BS", 2)],
)
def test_step_of_a_layer(mesh: str, placements: str, batch: int) -> None:
    """With the public functions; where heads are sharded, the KL loss is exact as well."""
    errors = on_four(dtensor_rules.whole_step, mesh, batch, list(placements))
    assert max(errors) <= LARGEST_ERROR


@pytest.mark.smoke
@pytest.mark.parametrize("sizes", [(8,), pytest.param((8, 12), marks=nightly)])
def test_compiled_step(sizes: tuple[int, ...]) -> None:
    """The second size is symbolic to torch.compile."""
    for tokens in sizes:
        errors = on_four(dtensor_rules.whole_step, "2x2", 2, ["B", "N"], tokens, True)
        assert max(errors) <= LARGEST_ERROR


@pytest.mark.parametrize(
    ("mesh", "cache", "key"),
    [
        ("4", [Shard(2)], [Replicate()]), ("4", [Shard(2)], [Shard(1)]),
        ("2", [Replicate()], [Replicate()]), ("2x2", [Shard(2), Shard(2)], [Shard(1), Shard(1)]),
    ],
)  # fmt: skip
def test_scatter_writes(mesh: str, cache: list, key: list) -> None:
    on_four(dtensor_rules.scatter, mesh, cache, key)


@pytest.mark.parametrize(
    ("key_cache", "value_cache", "mode", "expected"),
    [
        ([Shard(0)], [Shard(0)], "Norm", "key_cache: expected Replicate() or Shard(dim=2) (heads)"),
        ([Partial()], [Replicate()], "Norm", "key_cache: expected Replicate() or Shard(dim=2)"),
        ([Replicate()], [Shard(2)], "Norm", "value_cache: expected Replicate(), as key_cache is"),
        ([Shard(2)], [Replicate()], "Norm", "value_cache: expected Shard(dim=2), as key_cache is"),
        ([Shard(1)], [Shard(1)], "PA_NZ", "key_cache: expected Replicate(), got"),
    ],
)
def test_scatter_refuses_what_it_cannot_write(
    key_cache: list, value_cache: list, mode: str, expected: str
) -> None:
    for message in on_four(dtensor_rules.refused_write, key_cache, value_cache, mode):
        assert message.startswith(f"ValueError: ascend::scatter_pa_kv_cache_: {expected}")


def test_keys_of_a_part_whose_queries_see_none() -> None:
    """In the second sequence, the last 3 of 10 queries see keys. The shard has its first two."""
    ends = torch.tensor([4, 14]), torch.tensor([5, 8])
    queries, keys = packed_lengths(*ends, begin=3, end=6, causal=True)
    assert queries.tolist() == [1, 3]
    assert keys.tolist() == [5, 5]


def test_limits_are_those_of_a_part() -> None:
    assert on_four(dtensor_rules.limits_of_parts, Shard(2)) == ["no error"] * 4
    for message in on_four(dtensor_rules.limits_of_parts, Replicate()):
        assert message.startswith("ValueError: ascend::sparse_flash_attention: query: expected")


def test_compare_sees_the_parts() -> None:
    assert on_four(dtensor_rules.compared) == [(1, 0)] * 4


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("plain", "TypeError: {}: expected a DTensor beside DTensors"),
        ("mesh", "ValueError: {}: expected the device mesh of query"),
        ("shape", "ValueError: {}: "),
        ("tokens", "{}: expected Replicate(), as query is sharded by heads, got Shard(dim=1)"),
        ("sum", "{}: expected Replicate(), as query is sharded by heads, got Partial(sum)"),
    ],
)  # fmt: skip
def test_wrong_key_rope(what: str, expected: str) -> None:
    start = expected.format("ascend::sparse_flash_attention: key_rope")
    for message in on_four(dtensor_rules.wrong_key_rope, what):
        assert start in message


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (Shard(3), "Replicate() or Shard(dim=0) (batch) or Shard(dim=1) (query tokens) or Shard("),
        (Partial(), "Replicate() or Shard(dim=0)"),
        (_StridedShard(2, split_factor=2), "Replicate() or Shard(dim=0)"),
        (Shard(1), "3 query tokens in 4 equal parts"),
        (Shard(2), "6 heads in 4 equal parts"),
    ],
)
def test_wrong_query(at: Any, expected: str) -> None:
    for message in on_four(dtensor_rules.wrong_query, at):
        assert f"ValueError: ascend::sparse_flash_attention: query: expected {expected}" in message


@pytest.mark.parametrize(
    ("query", "key"), [(Shard(0), Shard(0)), (Shard(2), Replicate())], ids=["B", "N"]
)
def test_no_communication(query: Any, key: Any) -> None:
    assert on_four(dtensor_rules.communication, query, key) == [0] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("mesh", "by", "sink_at", "gradient_at"),
    [
        ("4", [Shard(1)], [Shard(0)], [Shard(0)]), ("4", [Shard(0)], [Replicate()], [Partial()]),
        ("2x2", [Shard(0), Shard(1)], [Replicate(), Shard(0)], [Partial(), Shard(0)]),
        ("4", [Shard(1)], [Replicate()], [Shard(0)]),
    ],
    ids=["heads", "batches", "both", "a replicated sink"],
)  # fmt: skip
def test_sinks(mesh: str, by: list, sink_at: list, gradient_at: list, dtype: torch.dtype) -> None:
    on_four(dtensor_rules.with_sinks, mesh, by, sink_at, gradient_at, dtype)


def test_nothing_outlives_its_process_group() -> None:
    """Another one may have groups of the same names, or of others."""
    ran = fresh.run("""
        import torch, torch.distributed as dist, ascend_attn_ops as ops
        from ascend_attn_ops.distributed import enable_dtensor
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        ops.set_limits(None)
        enable_dtensor()
        for others in (3, 0):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            groups = [dist.new_group([0]) for _ in range(others)]
            mesh = init_device_mesh("cpu", (1, 1))
            at = [Replicate(), Shard(1)]
            query = distribute_tensor(torch.randn(1, 8, 2, 16), mesh, at)
            key = distribute_tensor(torch.randn(1, 8, 1, 16), mesh, [Replicate()] * 2)
            indices = distribute_tensor(torch.zeros(1, 8, 1, 4, dtype=torch.int32), mesh, at)
            out, *_ = ops.sparse_flash_attention(query, key, key, indices, scale_value=1.0)
            print(out.device_mesh is mesh)
            dist.destroy_process_group()
    """)
    assert ran.out.split().count("True") == 2, ran.err  # beside what gloo prints


def test_every_operator_has_its_axes() -> None:
    """An operator has axes to shard, unless its record says that it takes no DTensors."""
    without = {x.name for x in OPERATORS.values() if not x.takes_dtensors}
    assert set(LINES) == registered.OPERATORS - without


def test_an_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.9.1"))
    enable_dtensor.cache_clear()
    with pytest.raises(RuntimeError, match=r"torch: expected 2\.10 or later, got 2\.9\.1"):
        enable_dtensor()
