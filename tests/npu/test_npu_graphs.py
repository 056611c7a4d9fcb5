"""NPUGraph: replays of captured calls, whose tensors have new contents and lists new lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import ascend_attn_ops as ops
import cann_simulator
import pytest
import torch
import torch_npu
from ascend_attn_check.samples.scatter_pa_kv_cache import CASES, CacheCase, build
from device_samples import DEVICE_RECIPES, is_pack_gradient
from fuzz.npu_graphs import Step
from support.checkout import ROOT
from support.pages import blocks_of
from support.samples import Recipe, as_tuple, bytes_of
from support.simulated_npu import (
    TASK_QUEUE,
    attention_functions,
    captured,
    once,
    run_in_new_process,
)
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


def assert_replays(graph: Any, outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    poison(outputs)
    graph.replay()
    torch.npu.synchronize()
    assert same_bytes(outputs, expected)


TRAINED = [x for x in WITHOUT_WAITING if x.differentiable and not waits_in_backward(x)]


@captured
@pytest.mark.parametrize(
    ("recipe", "with_gradients"), [*product(WITHOUT_WAITING, [False]), *product(TRAINED, [True])],
    ids=lambda x: getattr(x, "id", "trained" if x else "called"),
)  # fmt: skip
def test_replays_compute_with_what_the_tensors_hold(recipe: Recipe, with_gradients: bool) -> None:
    original = recipe.make(torch.bfloat16)
    step = Step(original.to("npu"), with_gradients)
    graph, outputs = capture(step)
    seen: list[Sequence[Tensor]] = []
    for factor in (0.5, 0.75):
        contents = original.scaled(factor)
        if factor == 0.75 and "weights" in contents.tensors:
            # The indexer's order does not depend on a factor, but on its sign.
            contents = contents.replace(weights=-contents.tensors["weights"])
        step.fill(contents)
        seen.append(step())
        for _ in range(2):
            assert_replays(graph, outputs, seen[-1])
    assert not same_bytes(*seen) or not any(x.numel() for x in original.tensors.values())


@captured
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.usefixtures("no_limits")
def test_replays_write_caches(case: CacheCase) -> None:
    original = build(case, torch.bfloat16)
    step = Step(to_npu(original), with_gradients=False)
    names = [name for name in original.tensors if name.endswith("_cache")]
    caches = [step.sample.tensors[name] for name in names]
    graph, _ = capture(step)
    # Nothing has run yet.
    assert same_bytes(caches, [original.tensors[name] for name in names])
    for factor in (-1, 3):
        step.fill(original.scaled(factor))
        before = [x.clone() for x in caches]
        step()
        expected = [x.clone() for x in caches]
        for x, y in zip(caches, before, strict=True):
            x.copy_(y)
        graph.replay()
        torch.npu.synchronize()
        assert same_bytes(caches, expected)


BLOCKS, BLOCK, TOP, B = 12, 4, 6, 3


def decode(x: dict[str, Tensor]) -> Tensor:
    """A step of an indexer over a paged cache: what a replay reads anew are tensors alone."""
    ops.scatter_pa_kv_cache_(x["row"], x["cache"], x["slots"])
    return ops.lightning_indexer(
        x["query"], x["cache"], x["weights"], sparse_count=TOP, layout_key="PA_BSND",
        block_table=x["table"], actual_seq_lengths_key=x["lengths"],
    )[0]  # fmt: skip


def tensors_of_a_step(lengths: list[int]) -> dict[str, Tensor]:
    shapes = {
        "row": (B, 1, 32), "cache": (BLOCKS, BLOCK, 1, 32), "query": (B, 1, 2, 32),
        "weights": (B, 1, 2),
    }  # fmt: skip
    table = torch.randperm(BLOCKS)[: B * 3].view(B, 3).int()
    return {
        **{name: torch.randn(shape).bfloat16() for name, shape in shapes.items()},
        "table": table,
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "slots": ops.slot_mapping(table, torch.tensor(lengths) - 1, BLOCK),
    }


@captured
@pytest.mark.usefixtures("no_limits")
def test_a_decode_step_with_other_lengths_blocks_and_slots() -> None:
    graphed = {name: x.npu() for name, x in tensors_of_a_step([1, 1, 1]).items()}
    graph, (indices,) = capture(lambda: decode(graphed))
    for lengths in ([5, 12, 1], [12, 3, 7]):
        eager = {name: x.npu() for name, x in tensors_of_a_step(lengths).items()}
        for name, x in eager.items():
            graphed[name].copy_(x)
        poison([indices])
        graph.replay()
        torch.npu.synchronize()
        expected = decode(eager)
        assert same_bytes([indices, graphed["cache"]], [expected, eager["cache"]])
        # A row has as many keys as its sequence, or the best of them.
        counts = (indices >= 0).sum(-1).flatten().tolist()
        assert counts == [min(TOP, length) for length in lengths]


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


def prompt_with_a_tensor(tensors: list[Tensor], lengths: Tensor) -> object:
    return ops.prompt_flash_attention(
        *tensors, num_heads=2, layout="BSND", actual_seq_lengths_key=lengths
    )


def indexer_with_a_list(tensors: list[Tensor], _: Tensor) -> object:
    query, key, _ = tensors
    return ops.lightning_indexer(
        query, key[:, :, :1], query[..., 0], actual_seq_lengths_key=[3, 5], sparse_count=4
    )


@captured
@pytest.mark.usefixtures("no_limits")
@pytest.mark.parametrize(
    ("call", "place"), [(prompt_with_a_tensor, "the host"), (indexer_with_a_list, "npu:0")]
)
def test_lengths_that_no_replay_could_read(call: Callable[..., object], place: str) -> None:
    tensors, lengths = dense(), torch.tensor([3, 5], dtype=torch.int32, device="npu")
    with (
        torch.npu.graph(torch.npu.NPUGraph()),
        pytest.raises(
            NotImplementedError, match=f"actual_seq_lengths_key: expected a tensor on {place}"
        ),
    ):
        call(tensors, lengths)


@captured
def test_a_mask_that_a_capture_makes_is_its_own() -> None:
    """Before the first replay it holds nothing that another call could use. The first call outside
    makes the mask of all others, and waits once."""
    output, _ = run_in_new_process("""
        import ascend_attn_ops as ops, cann_simulator, torch
        from test_npu_graphs import capture, dense, poison, same_bytes

        tensors = dense()

        def call(mode, **lengths):
            options = dict(num_heads=2, layout="BSND", sparse_mode=mode, **lengths)
            return ops.prompt_flash_attention(*tensors, **options)

        with torch.npu.graph(torch.npu.NPUGraph()):
            try:
                torch.ops.ascend.prompt_flash_attention.relaunch(
                    *tensors, layout="BSND", sparse_mode=3, out=[torch.empty_like(tensors[0])],
                    workspace=torch.empty(0, dtype=torch.uint8, device="npu"),
                )
            except NotImplementedError as error:
                print(error)
        graph, (out,) = capture(lambda: call(2))
        before = cann_simulator.waits()
        expected = call(2)
        print(cann_simulator.waits() - before)
        call(3)
        print(cann_simulator.waits() - before)
        poison([out])
        graph.replay()
        print(same_bytes([out], [expected]), same_bytes([out], [call(0)]))
    """)
    refused, *rest = output.splitlines()
    assert "expected a mask, or a call of this sparse_mode before the capture" in refused
    assert rest == ["1", "1", "True False"]


@captured
def test_torchs_operators() -> None:
    """A capture changes nothing; replays compute several results, also of lists."""
    x, places = torch.arange(4.0, device="npu"), torch.tensor([3, 1], device="npu")

    def step() -> tuple[Tensor, ...]:
        x.add_(1)
        return (*torch._foreach_mul([x, x[:1]], 2), *x.topk(2), x[places])

    graph, outputs = capture(step)
    assert x.tolist() == [0, 1, 2, 3]
    for number in (1, 2):
        poison(outputs)
        graph.replay()
        now = [number + i for i in range(4)]
        assert x.tolist() == now
        doubled, first, best, at, chosen = (y.tolist() for y in outputs)
        assert (doubled, first) == ([2 * y for y in now], [2 * number])
        assert (best, at, chosen) == (now[:1:-1], [3, 2], [now[3], now[1]])


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
    blocks = [x.code for x in blocks_of(ROOT / "docs" / "graphs.md", runs=False)]
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


@captured
@once
@pytest.mark.parametrize("name", ["npu/graphs/calls", "npu/graphs/training"])
def test_random_captures(name: str) -> None:
    """A few of those that `python -m cann_simulator tests/fuzz/run.py --only 'npu/*'` makes.

    Runs in a process of its own: cases set one thread, and threads that they start keep that."""
    output, _ = run_in_new_process(f"""
        import torch
        from fuzz import npu_graphs, run
        for number in range(30):
            run.run_case(npu_graphs.CASES["{name}"], run.case_seed(0, "{name}", number))
        print("30 cases")
    """)
    assert output.split()[-2:] == ["30", "cases"]


@pytest.mark.skipif(TASK_QUEUE != 2, reason="at the other levels torch_npu captures")
def test_level_2() -> None:
    with pytest.raises(RuntimeError, match="Do not support TASK_QUEUE_ENABLE = 2"):
        torch.npu.NPUGraph().capture_begin()
