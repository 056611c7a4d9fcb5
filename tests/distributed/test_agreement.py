"""A call that is wrong on one rank is an error on all of them, before anything travels."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_ops import _C, distributed
from ascend_attn_ops.distributed import SequenceShards, _agreement
from ascend_attn_ops.distributed._layout import GatheredKeys
from fuzz.wrong_ranks import FUNCTIONS, Drawing
from sparse_layer import Sizes, inputs, of_ranks
from support.freed import freed
from support.processes import on_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup

np = pytest.importorskip("numpy", reason="numpy is not installed")

METHODS = ("allgather", "ring", "ulysses")
SPARSE, INDEXER, LOSS = "sparse_flash_attention", "lightning_indexer", "lightning_indexer_kl_loss"
MLA, MLA_WITH_LOSS = "sparse_flash_mla", "sparse_flash_mla_with_indexer_loss"
COMPRESSED_INDEXER, COMPRESS = "lightning_indexer with compressed keys", "compress_keys"
LOSS_WITH_TARGET = "lightning_indexer_kl_loss with a target"
# Arguments that the fuzzer would draw.
COMMON: dict[str, dict[str, Any]] = {
    INDEXER: {"return_values": False}, LOSS: {"reduction": "sum"},
    LOSS_WITH_TARGET: {"reduction": "sum", "normalize_target": False}, COMPRESS: {"overlap": True},
    MLA_WITH_LOSS: {"indexer_loss_weight": 0.5, "on_loss": None},
    **{x: {"method": x, "sparse_mode": 0, "scale_value": 1.0} for x in METHODS},
}  # fmt: skip


def valid(group: ProcessGroup, name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function on these ranks, of which the second of three has no tokens, and its arguments."""
    function = FUNCTIONS["flash_attention_score" if name in METHODS else name]
    if name in (INDEXER, LOSS, SPARSE, *METHODS):
        shards = SequenceShards([2], group)
    else:
        shards = SequenceShards([9], group, "contiguous")
    drawings = (Drawing(random.Random(i), shards, torch.float32) for i in count())
    drawn = map(function.valid, drawings)
    arguments = next(x for x in drawn if name != MLA or "cmp_sparse_indices" in x)
    return partial(function.call, shards), {**arguments, **COMMON.get(name, {})}


def message(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011, the message has the type
        call()
    return f"{caught.type.__name__}: {caught.value}"


def assert_all_are_told(messages: list[str], expected: str) -> None:
    assert len(set(messages)) == 1
    assert re.match(expected, messages[0]), messages[0]


def is_wrong(group: ProcessGroup) -> bool:
    return group.rank() == group.size() - 1


class OfOthers(GatheredKeys):
    """Keys that were gathered for other shards."""

    def __init__(self, x: Tensor) -> None:
        self.layout, self.local, self.dtype = None, x, x.dtype  # type: ignore[assignment]
        self.requires_grad = x.requires_grad


def twice(x: Tensor) -> Tensor:
    return torch.cat((x, x))


def shorter(x: Tensor) -> Tensor:
    return x[..., :-1]


def on_meta(x: Tensor) -> Tensor:
    return x.to("meta")


def filled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.full_like(x, value)


class Unspeakable(Exception):
    """Cannot be made from its message, nor pickled."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})")
        self.callback = lambda: code


class Raises:
    """An option whose repr raises."""

    def __repr__(self) -> str:
        raise Unspeakable(3, "no text")


ROPE = torch.zeros(1, 4, 4)
ROPES = {"query_rope": ROPE, "key_rope": ROPE}
# A function, what is wrong on the last rank, and what all ranks are told.
CASES: list[tuple[str, dict[str, Any], str]] = [
    (SPARSE, {"key": twice, "value": twice}, "ValueError: .*key: expected the 1 lo"),
    (SPARSE, {"key_rope": Tensor.double}, "TypeError: .*key_rope: .*dtype"),
    (SPARSE, {"layout": "BSH"}, "ValueError: .*layout: expected 'TND' or"),
    (SPARSE, {"query_rope": 3}, "TypeError: .*query_rope: .* got int"),
    (SPARSE, {"sparse_indices": filled(1)},
     r"ValueError: .*sparse_indices: expected values in \[-1, 1\), got 1 at \(0, 0, 0\)"),
    (SPARSE, {"scale_value": np.float64(0.3)}, "ValueError: .*scale_value: .* same"),
    (SPARSE, {"scale_value": freed(torch.tensor(0.3))},
     "ValueError: .*scale_value: expected a storage that holds every element"),
    (SPARSE, {"sparse_mode": torch._efficientzerotensor(1, dtype=torch.int64)},
     "ValueError: .*sparse_mode: expected the same on all ranks, got 3 on rank 0"),
    (SPARSE, {"save_gathered": True}, "ValueError: .*save_gathered: .* the same on"),
    (INDEXER, {"key": on_meta}, "ValueError: .*key: .*device"),
    (INDEXER, dict.fromkeys(("query", "key", "weights"), on_meta),
     r"ValueError: .*query: expected device cpu or cuda \(the group's\), got meta"),
    (INDEXER, {"sparse_count": 4}, "ValueError: .*sparse_count: .* same"),
    (INDEXER, {"sparse_counts": 3}, "TypeError: .*unexpected keyword"),
    (INDEXER, {"key": OfOthers},
     "ValueError: .*key: expected keys that were prefetched for the same shards"),
    (INDEXER, {"query": OfOthers},
     "TypeError: .*query: expected a tensor of this rank's tokens, got OfOthers"),
    (LOSS, {"reduction": "max"}, "ValueError: .*reduction: expected 'sum'"),
    (LOSS, {"normalizer": 5.0}, "ValueError: .*normalizer: .* same on all"),
    (LOSS, {"normalizer": Raises()}, r"RuntimeError: Unspeakable: no text \(3\)"),
    (LOSS, {"token_weight": torch.ones(7)},
     "ValueError: .*token_weight: expected the 1 local tokens"),
    (LOSS, {"sparse_indices": filled(-2)},
     r"ValueError: .*sparse_indices: expected values in \[-1, 1\), got -2"),
    (LOSS, {"softmax_max": filled(0.5), "softmax_sum": filled(0.5)},
     "ValueError: .*_kl_loss: softmax_sum: expected sums of .*, got 0.5"),
    ("allgather", {"method": "star"}, "ValueError: .*method: expected 'allgather', 'ring'"),
    ("allgather", {"method": "ulysses"}, "ValueError: .*number of heads that the 3 ranks"),
    ("allgather", {"sparse_mode": 5}, "NotImplementedError: .*sparse_mode: expected one of"),
    ("allgather", {"query": None}, "ValueError: .*query: expected a tensor"),
    ("allgather", {"query": Tensor.to_sparse}, "NotImplementedError: .*query: .* dense"),
    ("allgather", {"query": freed}, "ValueError: .*query: expected a storage that holds"),
    *((method, changes, expected)
      for method in METHODS
      for changes, expected in (
          ({"num_heads": "4"}, "TypeError: .*num_heads: .* got '4'"),
          ({"query_rope": ROPE}, r"\w+: .*key_rope: expected a tensor"),
          ({"key_rope": ROPE}, r"\w+: .*query_rope: expected a tensor"),
          ({**ROPES, "key_rope": torch.zeros(1, 4, 5)}, "ValueError: .*key_rope: .*Dr = 4"),
          ({**ROPES, "key_rope": twice(ROPE)}, "ValueError: .*key_rope: .* 1 local tokens"),
          ({**ROPES, "query_rope": ROPE.half()}, "TypeError: .*query_rope: .* dtype float32"),
          (ROPES, "ValueError: .*query_rope"),
          ({"sink": torch.zeros(5)}, r"ValueError: .*sink: .* \(4\), one score .* got \[5\]"),
          ({"sink": torch.zeros(1)}, r"ValueError: .*sink: expected shape \(4\).* got \[1\]"),
          ({"sink": torch.zeros(4).long()}, "TypeError: .*sink: .* dtype, got int64"),
          ({"sink": [0.0] * 4}, r"\w+: .*sink: expected a tensor of this .* tokens, got list"),
          ({"sink": torch.zeros(4)}, "ValueError: .*sink"),
      )),
    (COMPRESS, {"values": twice}, "ValueError: .*values: expected the 3 local tokens"),
    (COMPRESS, {"position_bias": shorter}, "ValueError: .*position_bias: expected shape"),
    (COMPRESS, {"position_bias": lambda x: x[:-1]}, "ValueError: .*position_bias: .* same on all"),
    (COMPRESS, {"overlap": False}, "ValueError: .*overlap: expected the same"),
    (COMPRESS, {"overlap": "yes"}, "TypeError: .*overlap: expected a bool"),
    (COMPRESS, {"layout": "BNSD"}, "ValueError: .*layout: expected 'TND' or 'BSND'"),
    (COMPRESSED_INDEXER, {"key": twice}, "ValueError: .*key: expected the 1 local compressed"),
    (COMPRESSED_INDEXER, {"return_values": True},
     "NotImplementedError: .*cmp_ratio: expected 1 where a gradient of the values"),
    (MLA, {"cmp_kv": twice},
     "ValueError: .*cmp_kv: expected the 1 local compressed keys of shards, .* got .2, 1, 8. "),
    (MLA, {"ori_kv": twice}, "ValueError: .*ori_kv: expected the 3 local tokens"),
    (MLA, {"ori_kv": None}, "TypeError: .*ori_kv: expected a tensor"),
    (MLA, {"cmp_kv": None, "cmp_sparse_indices": None},
     "ValueError: .*cmp_sparse_indices: expected the same on all ranks"),
    (MLA, {"cmp_sparse_indices": filled(4)},
     r"ValueError: .*cmp_sparse_indices: expected values in \[-1, \d\), got 4 at \(0, 0, 0\)"),
    (MLA, {"ori_win_left": 3}, "ValueError: .*ori_win_left: .*the same"),
    (MLA, {"cmp_ratio": "4"}, "TypeError: .*cmp_ratio: .* whole number"),
    (MLA_WITH_LOSS, {"cmp_sparse_indices": None},
     "TypeError: .*cmp_sparse_indices: expected a tensor, got NoneType"),
    (MLA_WITH_LOSS, {"indexer_loss_weight": torch.ones(2)},
     "ValueError: .*indexer_loss_weight: expected one element"),
    (MLA_WITH_LOSS, {"indexer_loss_weight": 2.0}, "ValueError: .*factor: expected the same"),
    (MLA_WITH_LOSS, {"indexer_loss_weight": "2"}, "TypeError: .*indexer_loss_weight: .*number"),
    (MLA_WITH_LOSS, {"on_loss": lambda _: print}, "ValueError: .*on_loss: expected the same"),
    (LOSS_WITH_TARGET, {"query": torch.zeros(3, 4, 8)},
     "ValueError: .*query: expected None beside a target"),
    (LOSS_WITH_TARGET, dict.fromkeys(("query_index", "key_index", "weights"), Tensor.detach),
     "ValueError: .*gradient: expected the same on all ranks"),
    (LOSS_WITH_TARGET, {"target": twice}, "ValueError: .*target: expected the 3 local"),
    (LOSS_WITH_TARGET, {"target": None}, "ValueError: .*query: expected the attention's, or a"),
    (LOSS_WITH_TARGET, {"cmp_ratio": 4}, "ValueError: .*cmp_ratio: expected the same on all"),
    (LOSS_WITH_TARGET, {"normalize_target": True}, "ValueError: .*normalize_target: .* same on"),
]  # fmt: skip


def wrong_call(group: ProcessGroup, number: int) -> str:
    """Returns the message of this rank, between two calls that succeed: ranks stay in step."""
    name, changes, _ = CASES[number]
    with ops.limits(None):
        call, good = valid(group, name)
        call(**good)
        wrong = {key: x(good[key]) if callable(x) else x for key, x in changes.items()}
        text = message(lambda: call(**{**good, **(wrong if is_wrong(group) else {})}))
        call(**good)
    return text


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{i}")
def test_wrong_on_one_rank(number: int) -> None:
    name, _, expected = CASES[number]
    # Two ranks divide the heads of "ulysses".
    messages = on_ranks(2 if name == "ulysses" else 3, wrong_call, number)
    assert_all_are_told(messages, expected)
    assert "\n" not in messages[0]


def wrong_lengths(group: ProcessGroup, given: list[Any]) -> str:
    lengths = given[group.rank()]
    return message(lambda: SequenceShards(lengths, group))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[4, 3], [4, 3], [4, 2]],
         r"ValueError: SequenceShards: lengths: expected the same on all ranks, "
         r"got \(4, 3\) on rank 0 and \(4, 2\) on rank 2"),
        ([[4], [-1], [4]],
         r"ValueError: SequenceShards: lengths: expected no negative length, "
         r"got \[-1\] \(on rank 1\)"),
        ([[4], [4.0], [4]], r"TypeError: SequenceShards: lengths: expected a list of integers"),
        ([[4], None, [4]], r"TypeError: SequenceShards: lengths: .* got None \(on rank 1\)"),
        ([[4], [2**70], [4]], r"ValueError: SequenceShards: lengths: expected the same on all"),
    ],
    ids=["differ", "negative", "type", "none", "huge"],
)  # fmt: skip
def test_lengths(given: list[Any], expected: str) -> None:
    assert_all_are_told(on_ranks(3, wrong_lengths, given), expected)


def lengths_of_iterators(group: ProcessGroup) -> None:
    expected = SequenceShards([6, 9], group).parts()
    for lengths in ((n for n in [6, 9]), iter([6, 9]), {6: 0, 9: 0}, range(6, 10, 3)):
        assert SequenceShards(lengths, group).parts() == expected


def test_lengths_may_be_an_iterator() -> None:
    on_ranks(2, lengths_of_iterators)


def broken_lengths(group: ProcessGroup) -> str:
    def lengths() -> Iterator[int]:
        yield 4
        if is_wrong(group):
            raise LookupError("no such sequence")

    return message(lambda: SequenceShards(lengths(), group))


def wrong_order(group: ProcessGroup) -> str:
    order = "contiguous" if is_wrong(group) else "zigzag"
    return message(lambda: SequenceShards([4], group, order))


def other_matrix_products(group: ProcessGroup) -> str:
    chosen = "float32" if is_wrong(group) else "bfloat16"
    with ops.limits(None), mock.patch.object(_C, "matrix_products", return_value=chosen):
        call, good = valid(group, INDEXER)
        return message(lambda: call(**good))


def breaks_a_limit(group: ProcessGroup) -> str:
    """The second rank, which has no tokens, as well."""
    call, good = valid(group, INDEXER)
    half = {name: x.bfloat16() for name, x in good.items() if isinstance(x, Tensor)}
    return message(lambda: call(**{**good, **half}))


def wrong_without_tokens(group: ProcessGroup) -> str:
    with ops.limits(None):
        call, good = valid(group, INDEXER)
        if not len(good["query"]):
            good["query"] = good["query"][:, 0]
        return message(lambda: call(**good))


def inference_tensor(group: ProcessGroup) -> str:
    with ops.limits(None):
        call, good = valid(group, SPARSE)
        if is_wrong(group):
            with torch.inference_mode():
                good["sparse_indices"] = good["sparse_indices"].clone()
        with torch.no_grad():
            call(**good)
        return message(lambda: call(**good))


# The argument of unshard on one rank, where the others give (2, 2).
UNSHARDED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "another shape": lambda: (torch.zeros(3, 2),),
    "a gradient": lambda: (torch.zeros(2, 2, requires_grad=True),),
    "a fake tensor": lambda: (FakeTensorMode().from_tensor(torch.zeros(2, 2)),),
    "a freed axis": lambda: (torch.zeros(2, 2), freed(torch.tensor(0))),
}


def wrong_unshard(group: ProcessGroup, wrong: str) -> str:
    shards = SequenceShards([6], group)
    arguments = UNSHARDED[wrong]() if is_wrong(group) else (torch.zeros(2, 2),)
    return message(lambda: shards.unshard(*arguments))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (broken_lengths, r"LookupError: no such sequence \(on rank 2\)$"),
        (wrong_order, ".*order: expected the same on all ranks, got 'zigzag' on rank 0"),
        (other_matrix_products, r"ValueError: .*: matrix products "
         r"\(set ASCEND_ATTN_OPS_CPU_CAPABILITY\): expected the same on all ranks, "
         "got 'bfloat16' on rank 0 and 'float32' on rank 2"),
        (breaks_a_limit, ".*query: expected Didx"),
        (wrong_without_tokens, r"ValueError: .*query: "),
        (inference_tensor, ".*sparse_indices: expected no inference tensor where gradients are"),
        (partial(wrong_unshard, wrong="another shape"),
         r".*x: expected the 2 tokens .* on axis 0, got shape \(3, 2\)"),
        (partial(wrong_unshard, wrong="a gradient"),
         ".*gradient: expected the same on .*, got False on rank 0"),
        (partial(wrong_unshard, wrong="a fake tensor"),
         r".*x: expected a tensor .*, got FakeTensor \(on rank 2\)"),
        (partial(wrong_unshard, wrong="a freed axis"),
         r".*dim: expected a whole number, got a tensor of int64 \[\] "),
    ],
)  # fmt: skip
def test_other_calls(call: Callable[..., str], expected: str) -> None:
    assert_all_are_told(on_ranks(3, call), expected)


def modified_before_the_backward(group: ProcessGroup, name: str) -> str:
    with ops.limits(None):
        call, good = valid(group, name)
        values = {"return_values": True} if name == INDEXER else {}
        out = call(**{**good, **values})[len(values)]
        if is_wrong(group):
            with torch.no_grad():
                good["query"].add_(1)
        return message(lambda: out.sum().backward())


@pytest.mark.parametrize("name", [SPARSE, INDEXER, MLA, *METHODS[:2]])
def test_wrong_in_the_backward_of_one_rank(name: str) -> None:
    messages = on_ranks(3, modified_before_the_backward, name)
    assert_all_are_told(messages, "RuntimeError: one of the variables needed for gradient")
    assert "(on rank 2)" in messages[0]


def test_a_group_on_devices_gets_hosts_of_its_own() -> None:
    """Although one that was destroyed had its name."""

    class Group:
        group_name, _device_types = "0", ()

    first, second = Group(), Group()
    dist = _agreement.dist
    with (
        mock.patch.object(dist, "get_process_group_ranks"),
        mock.patch.object(dist, "new_group", side_effect=lambda *_, **__: object()),
    ):
        hosts = [_agreement.host_group(x) for x in (first, second, first)]  # type: ignore[arg-type]
    assert hosts[0] is hosts[2] is not hosts[1]


def unchecked(group: ProcessGroup) -> None:
    sizes, lengths = Sizes(), [9, 4]
    with ops.limits(None):
        tokens = inputs(lengths, torch.float64, sizes)
        checked = SequenceShards(lengths, group)
        trusting = SequenceShards(lengths, group, check_calls=False)
        expected, actual = (of_ranks(tokens, x, sizes) for x in (checked, trusting))
        for name, x in expected.items():
            assert torch.equal(actual[name], x), name
        # A call that is wrong on all ranks is still an error on each.
        whole = (tokens[name] for name in ("query_index", "key_index", "weights"))
        options = {"sparse_count": 8, "shards": trusting}
        text = message(lambda: distributed.lightning_indexer(*whole, **options))
        assert "local tokens" in text


def test_calls_can_go_unchecked() -> None:
    on_ranks(2, unchecked)
