"""A simulated call ends in an error that names the place where CANN's kernel would go wrong.

The calls go through torch_npu's own operators, which launch what they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import ascend_attn_ops
import cann_simulator
import pytest
import torch
import torch_npu
from ascend_attn_check.samples import sparse_flash_mla as mla
from support.samples import Operator
from support.simulated_npu import TASK_QUEUE, run_in_new_process
from torch import Tensor

pytestmark = pytest.mark.skipif(
    TASK_QUEUE != 0, reason="torch_npu's task queue does not survive a failure"
)

D, ROPE, HEADS = 512, 64, 8
OPEN = 2**31 - 1


def normal(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).bfloat16().npu()


def integers(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).npu()


def refused(message: str) -> Any:
    return pytest.raises(RuntimeError, match=message)


def sparse(rows: list[list[int]], keys: int) -> dict[str, Tensor]:
    """A call of one sequence whose sparse_mode is 0, so that every query sees all keys."""
    key = normal(1, keys, 1, D)
    return {
        "query": normal(1, len(rows), HEADS, D), "key": key, "value": key,
        "sparse_indices": integers(*rows)[None, :, None],
        "query_rope": normal(1, len(rows), HEADS, ROPE), "key_rope": normal(1, keys, 1, ROPE),
    }  # fmt: skip


def forward(x: dict[str, Tensor], block: int = 1, **options: Any) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = torch_npu.npu_sparse_flash_attention(
        *(x[name] for name in ("query", "key", "value", "sparse_indices")), 0.05,
        query_rope=x["query_rope"], key_rope=x["key_rope"], sparse_block_size=block,
        attention_mode=2, **{"sparse_mode": 0, "return_softmax_lse": True} | options,
    )  # fmt: skip
    return outputs


def backward(x: dict[str, Tensor], block: int = 1, **options: Any) -> Any:
    n, s = x["query"].shape[2], x["query"].shape[1]
    return torch.ops.npu.npu_sparse_flash_attention_grad(
        *(x[name] for name in ("query", "key", "value", "sparse_indices")),
        x["query"], x["query"], torch.zeros(1, 1, s, n, device="npu"),
        torch.ones(1, 1, s, n, device="npu"), 0.05, block,
        query_rope=x["query_rope"], key_rope=x["key_rope"], layout="BSND", sparse_mode=0,
        pre_tokens=OPEN, next_tokens=OPEN, attention_mode=2, **options,
    )  # fmt: skip


CUT = "has the cut block 9 in slot"
PADDED = "row 1 of sparse_indices has -1 in slot"


@pytest.mark.parametrize(
    ("run", "rows", "keys", "block", "error"),
    [
        # Block 9 has the last seven of 79 keys.
        (forward, [[9, 1, 0]], 79, 8, None),
        (backward, [[1, 0, 9], [0, 9, 1]], 79, 8, f"row 1 of sparse_indices {CUT} 1 of the 3"),
        (backward, [[1, 0, 9], [2, 1, 9]], 79, 8, None),
        # Padding between keys.
        (forward, [[3, 2, -1, -1], [3, -1, 2, 1]], 20, 1, f"{PADDED} 1 .* and keys behind it"),
        (forward, [[3, 2, -1, -1], [3, 1, 2, -1]], 20, 1, None),
        (forward, [[3, -1, 2, 1]], 80, 8, None),
        # Padding in the gradient; of three keys, with three slots.
        (backward, [[3, 2, 1, 0], [3, 2, 1, -1]], 20, 1, f"{PADDED} 3 of the 4 .* out of bounds"),
        (backward, [[1, 0, 2, -1]], 3, 1, None),
        (forward, [[0, 1]], 12, 3, "sparse_block_size 3 is no power of two"),
        (backward, [[0, 1]], 12, 3, "sparse_block_size 3 is no power of two"),
        (backward, [[0, 1, 2, 3]], 1024, 128, "sparse_block_size 128 with 4 indices .* memory"),
        (backward, [list(range(8))], 1024, 128, None),
    ],
)
def test_sparse_indices(
    run: Callable[..., Any], rows: list[list[int]], keys: int, block: int, error: str | None
) -> None:
    with refused(error) if error else nullcontext():
        run(sparse(rows, keys=keys), block)


def test_row_without_keys() -> None:
    """Its output is infinite; our own launch fills it with zeros. In small blocks its statistics
    are those of as many keys as it has slots, far below all others."""
    call = sparse([[1, 0], [-1, -1]], keys=80)
    out = forward(call, block=8)[0].cpu()
    assert out[0, 0].isfinite().all()
    assert out[0, 1].isinf().all()
    out, softmax_max, softmax_sum = (x.cpu() for x in forward(call, block=4))
    assert (out[0, 1].float().abs() < 1e-25).all()
    assert (softmax_max[0, 0, 1] == -2e38).all()
    assert (softmax_sum[0, 0, 1] == 2).all()
    assert (softmax_max[0, 0, 0].abs() < 1e3).all()
    assert out[0, 0].float().abs().max() > 0.01


def test_value_other_than_key() -> None:
    """Key is read in its place, but for the forward of large blocks."""
    call = sparse([[0, 1, 2, 3]], keys=80)
    other = call | {"value": 2 * call["key"]}
    for run, block in ((forward, 1), (forward, 4), (backward, 1), (backward, 8)):
        pairs = zip(run(other, block), run(call, block), strict=True)
        assert all(torch.equal(x.cpu(), y.cpu()) for x, y in pairs), (run, block)
    assert not torch.equal(forward(other, 8)[0].cpu(), forward(call, 8)[0].cpu())


def test_lengths_of_padded_sequences() -> None:
    two = {name: torch.cat([x, x]) for name, x in sparse([[3, 2], [-1, 2]], keys=20).items()}
    with refused("row 3 of sparse_indices has -1 in slot 0"):  # row 1 is behind the first sequence
        forward(two, actual_seq_lengths_query=integers(1, 2))
    lengths = {"actual_seq_qlen": integers(1), "actual_seq_kvlen": integers(12)}
    with refused("actualSeqLengthsKvOptional in layout BSND"):
        backward(sparse([[0, 1]], keys=20), **lengths)


def indexer(queries: list[int], keys: list[int]) -> dict[str, Any]:
    ends = [integers(*torch.tensor(x).cumsum(0).tolist()) for x in (queries, keys)]
    return {
        "query": normal(sum(queries), 64, 128), "key": normal(max(sum(keys), 1), 1, 128),
        "weights": normal(sum(queries), 64), "ends": ends,
    }  # fmt: skip


def select(x: dict[str, Any]) -> None:
    torch_npu.npu_lightning_indexer(
        x["query"], x["key"], x["weights"], actual_seq_lengths_query=x["ends"][0],
        actual_seq_lengths_key=x["ends"][1], layout_query="TND", layout_key="TND",
        sparse_count=16, sparse_mode=3, return_value=True,
    )  # fmt: skip


@pytest.mark.parametrize(("queries", "keys"), [([5, 5, 5], [0, 0, 0]), ([17, 0], [0, 30])])
def test_no_sequence_with_queries_and_keys(queries: list[int], keys: list[int]) -> None:
    rows = sum(queries)
    with refused(f"the device writes {len(queries) * rows} rows into outputs of {rows}"):
        select(indexer(queries, keys))
    select(indexer([5, 5], [0, 5]))


def test_sequences_of_unequal_lengths() -> None:
    def gradient(queries: list[int], keys: list[int]) -> None:
        x = indexer(queries, keys)
        torch.ops.npu.npu_lightning_indexer_grad(
            x["query"], x["key"], normal(sum(queries), 1, 2),
            integers(*[[0, 1]] * sum(queries))[:, None], x["weights"],
            actual_seq_lengths_query=x["ends"][0], actual_seq_lengths_key=x["ends"][1],
            layout="TND", sparse_mode=3,
        )  # fmt: skip

    with refused("sequence 1 has 2 queries and 5 keys, and sequence 0"):
        gradient([2, 2], [4, 5])
    gradient([2, 2], [5, 5])


def test_more_slots_than_keys_of_an_indexer_without_a_causal_mask() -> None:
    def gradient(slots: int, mode: int) -> None:
        torch.ops.npu.npu_lightning_indexer_grad(
            normal(1, 2, 64, 128), normal(1, 7, 1, 128), normal(1, 2, 1, slots),
            integers(*[range(slots)] * 2)[None, :, None] % 7, normal(1, 2, 64),
            layout="BSND", sparse_mode=mode,
        )  # fmt: skip

    with refused("sequence 0 has 7 keys for the 8 slots of a row"):
        gradient(8, mode=0)
    gradient(7, mode=0)
    gradient(8, mode=3)


def test_deterministic_loss_on_an_odd_number_of_cores() -> None:
    tokens, stream = 30, torch.npu.Stream()
    x = sparse([[0]] * tokens, keys=tokens)

    def loss() -> None:
        torch_npu.npu_sparse_lightning_indexer_grad_kl_loss(
            x["query"].expand(1, tokens, 8, D).repeat(1, 1, 8, 1), x["key"],
            normal(1, tokens, 8, 128), normal(1, tokens, 1, 128), normal(1, tokens, 8),
            x["sparse_indices"], torch.zeros(1, 1, tokens, 64, device="npu"),
            torch.ones(1, 1, tokens, 64, device="npu"), 0.05,
            query_rope=x["query_rope"].repeat(1, 1, 8, 1), key_rope=x["key_rope"],
            layout="BSND", sparse_mode=3,
        )  # fmt: skip

    torch.npu.set_stream_limit(stream, 23, 46)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.npu.stream(stream), pytest.raises(RuntimeError, match=r"of 23 cores: .* waits"):
            loss()
        torch.npu.set_stream_limit(stream, 22, 44)
        with torch.npu.stream(stream):
            loss()
    finally:
        torch.use_deterministic_algorithms(False)


def test_large_heads_of_averaged_windows() -> None:
    def scatter(d: int, windows: int) -> None:
        with ascend_attn_ops.limits(None):
            torch.ops.ascend.scatter_pa_kv_cache_(
                normal(5, 1, d), normal(2, 16, 1, d), integers(0), normal(5, 1, d),
                normal(2, 16, 1, d), scatter_mode="Rope", compress_lens=integers(windows),
                compress_seq_offset=integers(1), seq_lens=integers(5),
            )  # fmt: skip

    with refused("key has heads of 1536: the device writes behind"):
        scatter(1536, windows=2)
    scatter(1472, windows=2)
    scatter(1536, windows=0)


def test_mask_with_tokens() -> None:
    """Tokens that the mask does not contain only leave out whole tiles."""
    q, k = normal(1, 2, 16, 64), normal(1, 2, 24, 64)
    open_mask = torch.zeros(1, 1, 16, 24, dtype=torch.bool, device="npu")
    band = torch.ones(16, 24, dtype=torch.bool).tril(8).triu(-3).logical_not().npu()[None, None]

    def call(mask: Tensor, pre: int, following: int) -> Tensor:
        out: Tensor = torch_npu.npu_fusion_attention(
            q, k, k, 2, "BNSD", atten_mask=mask, scale=0.1, sparse_mode=0, pre_tockens=pre,
            next_tockens=following,
        )[0]  # fmt: skip
        return out

    with refused(r"query 0 sees key 9, which preTokens 3"):
        call(open_mask, 3, 8)
    call(open_mask, 16, 24)
    q.requires_grad_()
    call(band, 3, 8).sum().backward()


def test_checks_end_where_they_are_switched_off() -> None:
    call = sparse([[3, 2, 1, -1]], keys=20)
    with cann_simulator.unchecked("results"), pytest.raises(RuntimeError, match="out of bounds"):
        backward(call)
    with cann_simulator.unchecked("bounds"):
        backward(call)


def test_the_environment_switches_checks_off() -> None:
    code = """
        import torch, torch_npu
        x = torch.randn(1, 2, 16, 64).bfloat16().npu()
        mask = torch.zeros(1, 1, 16, 16, dtype=torch.bool, device="npu")
        torch_npu.npu_fusion_attention(x, x, x, 2, "BNSD", atten_mask=mask, pre_tockens=3,
                                       next_tockens=3, sparse_mode=0)
        torch.npu.synchronize()
        print("ran")
    """
    assert run_in_new_process(code, CANN_SIM_UNCHECKED="bounds,results")[0] == "ran\n"


MLA = mla.DEVICE
TND = next(case for case in mla.DEVICE_CASES if case.layout == "TND" and case.kind == "csa")


def test_rows_behind_the_sequences_in_a_gradient() -> None:
    """The device would read behind the lengths: the simulation says so."""
    sample = mla.SPARSE_FLASH_MLA.make(replace(TND, tail=(3, 2, 1)), torch.bfloat16).to("npu")
    loss = sample.requires_grad(("query",)).call(torch.ops.ascend)[0].float().sum()
    with refused("ends at 22 of 25 rows"):
        loss.backward()


@pytest.mark.parametrize(
    ("operator", "case", "changes", "error"),
    [
        (mla.SPARSE_FLASH_MLA_GRAD, MLA, {"deterministic": True}, "deterministic mode"),
        (mla.SPARSE_FLASH_MLA, replace(MLA, pattern="first"), {}, "row 3 has fewer than 1 indices"),
        (mla.SPARSE_FLASH_MLA_GRAD, replace(MLA, pattern="first"), {}, "reads row -1"),
        (mla.SPARSE_FLASH_MLA_GRAD, replace(MLA, b=2, residual=(0, 3)), {}, "of the first batch"),
        (
            mla.SPARSE_FLASH_MLA_GRAD, replace(MLA, s=(20, 12, 5), residual=(0,)), {},
            "row 3 is before all original keys",
        ),
    ],
    ids=["deterministic", "forward-indices", "indices", "residuals", "before keys"],
)  # fmt: skip
def test_the_simulation_goes_wrong_where_the_device_does(
    operator: Operator, case: mla.MlaCase, changes: dict[str, Any], error: str
) -> None:
    sample = operator.make(case, torch.bfloat16).given(**changes).to("npu")
    with ascend_attn_ops.limits(None), pytest.raises(RuntimeError, match=error):
        [x.cpu() for x in sample.call(torch.ops.ascend)]
