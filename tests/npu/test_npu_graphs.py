"""NPUGraph: replays of captured calls, whose tensors have new contents and lists new lengths."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
import torch_npu
from ascend_attn_ops.check.gradients import incoming_gradients
from ascend_attn_ops.check.samples.scatter_pa_kv_cache import CASES, CacheCase, build
from device_samples import DEVICE_RECIPES, is_pack_gradient
from support.samples import OPERATORS, Recipe, Sample, as_tuple, bytes_of
from support.simulated_npu import TASK_QUEUE, attention_functions, captured, run_in_new_process
from test_npu_scatter_pa_kv_cache import to_npu
from torch import Tensor


def waits(recipe: Recipe) -> bool:
    """The host reads lengths of these: a graph cannot have them."""
    name, case = recipe.operator.name, recipe.case
    return is_pack_gradient(recipe) or (
        name == "sparse_flash_attention_grad"
        and getattr(case, "layout", "") == "BSND"
        and bool(getattr(case, "lengths", None))
    )


def waits_in_backward(recipe: Recipe) -> bool:
    case = recipe.case
    lengths = getattr(case, "lengths", None)
    if not lengths or recipe.operator.name not in ("lightning_indexer", "sparse_flash_attention"):
        return False
    return case.layout == "BSND" or (
        recipe.operator.name == "lightning_indexer" and len(lengths[0]) > 1
    )


WITHOUT_WAITING = [x for x in DEVICE_RECIPES if not waits(x)]
each_recipe = pytest.mark.parametrize("recipe", WITHOUT_WAITING, ids=lambda x: x.id)


def capture(call: Callable[[], Any], **options: Any) -> tuple[Any, tuple[Tensor, ...]]:
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, **options):
        outputs = call()
    return graph, as_tuple(outputs)


def poison(tensors: Sequence[Tensor]) -> None:
    for x in tensors:
        if x.numel():
            bytes_of_npu(x).fill_(0x7F)


def bytes_of_npu(x: Tensor) -> Tensor:
    return x.detach().view(torch.uint8) if x.dim() else x.detach().view(1).view(torch.uint8)


def same_bytes(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    pairs = list(zip(tensors, others, strict=True))
    return all(torch.equal(bytes_of(x.cpu()), bytes_of(y.cpu())) for x, y in pairs)


def fill(sample: Sample, contents: Sample) -> None:
    for name, x in sample.tensors.items():
        x.copy_(contents.tensors[name])


@captured
@each_recipe
def test_replays_compute_with_what_the_tensors_hold(recipe: Recipe) -> None:
    original = recipe.make(torch.bfloat16)
    sample = original.to("npu")
    graph, outputs = capture(lambda: sample.call(torch.ops.ascend))
    seen: list[tuple[Tensor, ...]] = []
    for factor in (0.5, 0.75):
        contents = original.scaled(factor)
        if factor == 0.75 and "weights" in contents.tensors:
            # The indexer's order does not depend on a factor, but on its sign.
            contents = contents.replace(weights=-contents.tensors["weights"])
        fill(sample, contents)
        poison(outputs)
        expected = contents.to("npu").call(torch.ops.ascend)
        for _ in range(2):
            graph.replay()
            torch.npu.synchronize()
            assert same_bytes(outputs, expected)
            poison(outputs)
        seen.append(expected)
    assert not same_bytes(*seen) or not any(x.numel() for x in sample.tensors.values())


@captured
@pytest.mark.parametrize(
    "recipe",
    [x for x in WITHOUT_WAITING if x.differentiable and not waits_in_backward(x)],
    ids=lambda x: x.id,
)
def test_replays_of_a_training_step(recipe: Recipe) -> None:
    """Autograd's own calls, captured in one graph with the forward."""
    operator = OPERATORS[recipe.operator.name]
    original = recipe.make(torch.bfloat16)

    def step(leaf: Sample, leaves: list[Tensor], d_outputs: tuple[Tensor, ...]) -> Any:
        results = operator.gradient_outputs(leaf.call(torch.ops.ascend))
        return torch.autograd.grad(results, leaves, d_outputs)

    def prepared(sample: Sample) -> tuple[Sample, list[Tensor], tuple[Tensor, ...]]:
        names = sample.tensor_names(operator.differentiable)
        leaf = sample.to("npu").requires_grad(names)
        d_outputs = incoming_gradients(leaf, leaf.call(torch.ops.ascend))
        return leaf, [leaf.tensors[name] for name in names], d_outputs

    leaf, leaves, d_outputs = prepared(original)
    graph, results = capture(lambda: step(leaf, leaves, d_outputs))
    for factor in (0.5, 0.75):
        contents = original.scaled(factor)
        other = prepared(contents)
        with torch.no_grad():
            fill(leaf, contents)
            for x, y in zip(d_outputs, other[2], strict=True):
                x.copy_(y)
        poison(results)
        graph.replay()
        torch.npu.synchronize()
        assert same_bytes(results, step(*other))


@captured
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.usefixtures("no_limits")
def test_replays_write_caches(case: CacheCase) -> None:
    original = build(case, torch.bfloat16)
    sample = to_npu(original)
    names = [name for name in sample.tensors if name.endswith("_cache")]
    before = {name: sample.tensors[name].clone() for name in names}
    graph, _ = capture(lambda: sample.call(torch.ops.ascend))
    # Nothing has run yet.
    assert same_bytes(list(before.values()), [sample.tensors[name] for name in names])
    for factor in (-1, 3):
        rows = [x for name, x in sample.tensors.items() if name in ("key", "value")]
        for x in rows:
            x.copy_(x * factor)
        expected = sample.replace(**{name: x.clone() for name, x in before.items()})
        expected.call(torch.ops.ascend)
        for name, x in before.items():
            sample.tensors[name].copy_(x)
        graph.replay()
        torch.npu.synchronize()
        written = [sample.tensors[name] for name in names]
        assert same_bytes(written, [expected.tensors[name] for name in names])
        # Some cases write nothing.
        writes_nothing = not case.rows or case.slots == "all skipped"
        writes_nothing |= case.scatter == "Alibi" and not case.lengths
        assert same_bytes(written, list(before.values())) == writes_nothing


BLOCKS, BLOCK, TOP, B = 12, 4, 6, 3


class Decoder:
    """One layer's decode step over a paged cache: what a replay reads anew are tensors alone."""

    def __init__(self) -> None:
        self.caches = [torch.zeros(BLOCKS, BLOCK, 1, size).to("npu", torch.bfloat16)
                       for size in (32, 16, 32)]  # fmt: skip
        self.table = torch.zeros(B, 3, dtype=torch.int32, device="npu")
        self.lengths = torch.ones(B, dtype=torch.int32, device="npu")
        self.slots = torch.zeros(B, dtype=torch.int32, device="npu")
        shapes = [(B, 32), (B, 16), (B, 32), (B, 1, 4, 32), (B, 1, 4, 16), (B, 1, 2, 32), (B, 1, 2)]
        self.rows = [torch.zeros(x, device="npu", dtype=torch.bfloat16) for x in shapes]

    def fill(self, step: int, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(step)
        for x in self.rows:
            x.copy_(torch.randn(x.shape, generator=generator))
        table = torch.randperm(BLOCKS, generator=generator)[: B * 3].view(B, 3).int()
        self.table.copy_(table)
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        positions = torch.tensor(lengths) - 1
        self.slots.copy_(ops.slot_mapping(table, positions, BLOCK))
        for i, x in enumerate(self.caches):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(i)))

    def __call__(self) -> tuple[Tensor, Tensor]:
        latent, rope, indexer, query, query_rope, query_index, weights = self.rows
        head = [x.unsqueeze(1) for x in (latent, rope, indexer)]
        ops.scatter_pa_kv_cache_(head[0], self.caches[0], self.slots, head[1], self.caches[1])
        ops.scatter_pa_kv_cache_(head[2], self.caches[2], self.slots)
        latents, ropes, index_keys = self.caches
        pages = {
            "actual_seq_lengths_key": self.lengths,
            "layout_key": "PA_BSND",
            "block_table": self.table,
        }
        indices, _ = ops.lightning_indexer(
            query_index, index_keys, weights, sparse_count=TOP, **pages
        )
        out, *_ = ops.sparse_flash_attention(
            query, latents, latents, indices, scale_value=0.2, query_rope=query_rope,
            key_rope=ropes, **pages,
        )  # fmt: skip
        return indices, out


@captured
@pytest.mark.usefixtures("no_limits")
def test_a_decode_step_with_other_lengths_blocks_and_slots() -> None:
    graphed, eager = Decoder(), Decoder()
    graph, outputs = capture(graphed)
    seen: list[list[Tensor]] = []
    for step, lengths in enumerate([[5, 12, 1], [12, 3, 7]]):
        graphed.fill(step, lengths)
        eager.fill(step, lengths)
        poison(outputs)
        graph.replay()
        torch.npu.synchronize()
        expected = [x.clone() for x in (*eager(), *eager.caches)]
        assert same_bytes([*outputs, *graphed.caches], expected)
        # A row has as many keys as its sequence, or the best of them.
        counts = (outputs[0] >= 0).sum(-1).flatten().tolist()
        assert counts == [min(TOP, length) for length in lengths]
        seen.append(expected)
    assert not any(torch.equal(x, y) for x, y in zip(*seen, strict=True))


# Calls that wait for the device.


@captured
@pytest.mark.parametrize("recipe", [x for x in DEVICE_RECIPES if waits(x)], ids=lambda x: x.id)
def test_what_waits_is_refused(recipe: Recipe) -> None:
    sample = recipe.make(torch.bfloat16).to("npu")
    with (
        torch.npu.graph(torch.npu.NPUGraph()),
        pytest.raises(NotImplementedError, match=r"actual_seq_lengths_\w+: .* a graph captures"),
    ):
        sample.call(torch.ops.ascend)


def dense(seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 8, 2, 64)
    return [torch.randn(shape, generator=generator).to("npu", torch.bfloat16) for _ in range(3)]


def packed(seed: int = 0) -> list[Tensor]:
    return [x.flatten(0, 1) for x in dense(seed)]


@captured
@pytest.mark.parametrize(
    ("wait", "end"),
    [("torch.npu.current_stream().synchronize()", "kept"), ("torch.npu.synchronize()", "lost")],
)
def test_the_host_cannot_wait_in_a_capture(wait: str, end: str) -> None:
    """In a process of its own: an older torch_npu captures nothing after a capture that failed."""
    output, _ = run_in_new_process(f"""
        import torch, torch_npu
        x = torch.ones(4, device="npu")
        graph = torch.npu.NPUGraph()
        try:
            with torch.npu.graph(graph):
                y = x * 2
                try:
                    {wait}
                except RuntimeError as error:
                    assert "while a graph is being captured" in str(error), error
                else:
                    raise AssertionError("waited for what nothing computes")
        except RuntimeError:
            print("lost")
        else:
            graph.replay()
            assert y.tolist() == [2] * 4
            print("kept")
    """)
    assert output.endswith(f"{end}\n")


@captured
@pytest.mark.usefixtures("no_limits")
def test_lengths_that_the_host_would_read() -> None:
    query, key, value = dense()
    lengths = torch.tensor([3, 5], dtype=torch.int32, device="npu")
    call = dict[str, Any](num_heads=2, layout="BSND", actual_seq_lengths_key=lengths)
    with (
        torch.npu.graph(torch.npu.NPUGraph()),
        pytest.raises(NotImplementedError, match="actual_seq_lengths_key: expected a list"),
    ):
        ops.prompt_flash_attention(query, key, value, **call)


@captured
@pytest.mark.usefixtures("no_limits")
def test_lists_where_a_tensor_can_change() -> None:
    query, key, _ = dense()
    weights = query[..., 0]
    with (
        torch.npu.graph(torch.npu.NPUGraph()),
        pytest.raises(NotImplementedError, match="actual_seq_lengths_key: expected a tensor"),
    ):
        ops.lightning_indexer(
            query, key[:, :, :1], weights, actual_seq_lengths_key=[3, 5], sparse_count=4
        )


@captured
def test_a_mask_that_a_capture_builds_is_not_kept() -> None:
    """Before the first replay it holds nothing that another call could use."""
    tensors = dense()
    call = dict[str, Any](num_heads=2, layout="BSND", sparse_mode=2)
    ops.masks._new_mask.cache_clear()
    graph, (out,) = capture(lambda: ops.prompt_flash_attention(*tensors, **call))
    expected = ops.prompt_flash_attention(*tensors, **call)
    assert ops.masks._new_mask.cache_info().currsize == 1
    poison([out])
    graph.replay()
    torch.npu.synchronize()
    assert same_bytes([out], [expected])
    assert not same_bytes(
        [out], [ops.prompt_flash_attention(*tensors, **call | {"sparse_mode": 0})]
    )


@captured
def test_a_capture_changes_nothing() -> None:
    x, places = torch.arange(4.0, device="npu"), torch.tensor([3, 1], device="npu")
    before = x.clone()

    def step() -> Tensor:
        x.add_(1)
        places.mul_(0)
        return torch.zeros(2, device="npu") + x[places]

    graph, (out,) = capture(step)
    assert same_bytes([x, places], [before, torch.tensor([3, 1])])
    assert out.tolist() != [1, 1]
    graph.replay()
    assert x.tolist() == [1, 2, 3, 4]
    assert out.tolist() == [1, 1]


@captured
def test_torchs_operators_with_several_results() -> None:
    tensors = [torch.ones(3, device="npu"), torch.ones(2, device="npu")]
    graph, outputs = capture(
        lambda: (*torch._foreach_mul(tensors, 2), *torch.cat(tensors).topk(2), tensors[0].sum())
    )
    for numbers in ([3.0, 1, 2], [4.0, 6, 5]):
        tensors[0].copy_(torch.tensor(numbers))
        poison(outputs)
        graph.replay()
        doubled, ones, best, places, total = (x.tolist() for x in outputs)
        assert (doubled, ones) == ([2 * x for x in numbers], [2, 2])
        assert best == sorted(numbers)[:0:-1]
        assert [numbers[place] for place in places] == best
        assert total == sum(numbers)


@captured
@pytest.mark.usefixtures("no_limits")
def test_compiled_with_graphs() -> None:
    """The backend of torch_npu that captures: its later calls launch nothing, they replay."""

    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ops.prompt_flash_attention(query * 2, key, value, num_heads=2, layout="BSND") + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="npugraphs", fullgraph=True)
    launches = []
    with torch.no_grad():
        for seed in range(5):
            tensors = dense(seed)
            with cann_simulator.recorded_calls() as log:
                try:
                    out = compiled(*tensors).clone()
                except torch._dynamo.exc.BackendCompilerFailed as error:
                    if "No module named 'triton'" in str(error):
                        version = torch_npu.__version__
                        pytest.skip(f"the backend of torch_npu {version} imports triton")
                    raise
            launches.append(attention_functions(log).total())
            assert same_bytes([out], [step(*tensors)])
    assert launches == [1, 1, 0, 0, 0]


@captured
def test_the_page() -> None:
    """Its examples run, within the limits of the device, and give what eager calls give."""
    page = (Path(__file__).parents[2] / "docs" / "graphs.md").read_text()
    blocks = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    checks = [
        "assert torch.equal(indices, step()[0])",
        "def eager(*lengths):\n"
        "    return ops.prompt_flash_attention(query, key, value, num_heads=8, layout='BSND',\n"
        "        actual_seq_lengths_key=list(lengths))\n"
        "assert torch.equal(out, eager(100, 31)) and torch.equal(doubled, out * 2)\n"
        "assert not torch.equal(out, eager(128, 128))",
        "assert torch.equal(out, eager(64, 7))\nprint('done')",
    ]
    program = "\n".join(x for pair in zip(blocks, checks, strict=True) for x in pair)
    output, _ = run_in_new_process(program)
    assert output == "done\n"


@pytest.mark.skipif(TASK_QUEUE != 2, reason="at the other levels torch_npu captures")
def test_level_2() -> None:
    with pytest.raises(RuntimeError, match="Do not support TASK_QUEUE_ENABLE = 2"):
        torch.npu.NPUGraph().capture_begin()
