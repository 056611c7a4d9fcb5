"""NPUGraph: lengths that a graph updates, events that it waits for, several streams in one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
import torch_npu
from support.simulated_npu import captured, run_in_new_process
from test_npu_graphs import assert_replays, capture, dense, packed, poison, same_bytes
from torch import Tensor

pytestmark = [captured, pytest.mark.usefixtures("no_limits")]

QUERY, KEY = "actual_seq_lengths_query", "actual_seq_lengths_key"


def prompt(tensors: list[Tensor], **lengths: list[int]) -> list[Tensor]:
    return [ops.prompt_flash_attention(*tensors, num_heads=2, layout="BSND", **lengths)]


def score(tensors: list[Tensor], **lengths: list[int]) -> list[Tensor]:
    return list(ops.flash_attention_score(*tensors, num_heads=2, layout="TND", **lengths))


def score_grad(tensors: list[Tensor], **lengths: list[int]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out, *_ = ops.flash_attention_score(*leaves, num_heads=2, layout="TND", **lengths)
    return list(torch.autograd.grad(out, leaves, tensors[0]))


def sink_grad(tensors: list[Tensor], **lengths: list[int]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (*tensors, tensors[0][0, :, 0].float())]
    options: dict[str, Any] = {"num_heads": 2, "layout": "TND", **lengths}
    out, *statistics = ops.flash_attention_score(*leaves[:3], sink=leaves[3], **options)
    return [out.detach(), *statistics, *torch.autograd.grad(out, leaves, tensors[0])]


def infer(tensors: list[Tensor], **lengths: list[int]) -> list[Tensor]:
    options: dict[str, Any] = {"num_heads": 2, "layout": "BSND", "return_softmax_lse": True}
    return list(ops.fused_infer_attention_score(*tensors, **options, **lengths))


def decode(tensors: list[Tensor], **lengths: list[int]) -> list[Tensor]:
    """One query of each sequence, whose keys are all in the first block of a cache."""
    query, key, value = tensors
    pages = [x.view(1, 16, 128) for x in (key, value)]
    table = torch.zeros(2, 1, dtype=torch.int32, device="npu")
    return list(ops.fused_infer_attention_score(
        query[:, :1].contiguous(), *pages, num_heads=2, layout="BSND", block_table=table,
        block_size=16, return_softmax_lse=True, **lengths,
    ))  # fmt: skip


def pack_with_sink(tensors: list[Tensor], **lengths: list[int]) -> list[Tensor]:
    options: dict[str, Any] = {"num_heads": 2, "layout": "TND", "return_softmax_lse": True}
    sink = tensors[0][0, :, 0]
    return list(ops.fused_infer_attention_score(*tensors, sink=sink, **options, **lengths))


def fused(tensors: list[Tensor], **lengths: list[int]) -> list[Tensor]:
    """torch_npu's own."""
    names = {QUERY: "actual_seq_lengths", KEY: "actual_seq_lengths_kv"}
    renamed: Any = {names[name]: x for name, x in lengths.items()}
    results = torch.ops.npu.npu_fused_infer_attention_score(
        *tensors, num_heads=2, input_layout="BSND", scale=0.125, **renamed
    )
    return [results[0]]


# A call, its tensors, lengths of the capture and of two updates, and their names for an update.
CALLS: dict[str, tuple[Callable[..., list[Tensor]], Callable[[], list[Tensor]], list[Any], Any]] = {
    "prompt_flash_attention": (prompt, dense, [{KEY: [8, 8]}, {KEY: [3, 5]}, {KEY: [1, 8]}], {}),
    "prompt_flash_attention, queries": (
        prompt, dense, [{QUERY: [8, 8], KEY: [8, 8]}, {QUERY: [2, 7], KEY: [3, 5]}], {},
    ),
    "flash_attention_score": (
        score, packed, [{QUERY: [8, 16], KEY: [8, 16]}, {QUERY: [5, 16], KEY: [9, 16]}], {},
    ),
    "its gradient": (
        score_grad, packed, [{QUERY: [8, 16], KEY: [8, 16]}, {QUERY: [5, 16], KEY: [9, 16]}], {},
    ),
    "its gradient with a sink": (
        sink_grad, packed, [{QUERY: [8, 16], KEY: [8, 16]}, {QUERY: [5, 16], KEY: [9, 16]}], {},
    ),
    "fused_infer_attention_score": (
        infer, dense, [{KEY: [8, 8]}, {KEY: [3, 5]}, {KEY: [0, 8]}], {},
    ),
    "fused_infer_attention_score, decoding": (
        decode, dense, [{KEY: [16, 16]}, {KEY: [3, 0]}], {},
    ),
    "fused_infer_attention_score, a sink": (
        pack_with_sink, packed,
        [{QUERY: [8, 16], KEY: [8, 16]}, {QUERY: [5, 16], KEY: [0, 16]}], {},
    ),
    "npu_fused_infer_attention_score": (
        fused, dense, [{QUERY: [8, 8], KEY: [8, 8]}, {QUERY: [8, 8], KEY: [3, 5]}],
        {QUERY: "actual_seq_lengths", KEY: "actual_seq_lengths_kv"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("no_leak")
def test_updated_lengths(name: str) -> None:
    """Updates two layers in one graph, with later work that reads their outputs."""
    call, make, all_lengths, names = CALLS[name]
    tensors, others = make(), [x * 0.5 for x in make()]

    def model(first: dict[str, Any], second: dict[str, Any]) -> list[Tensor]:
        outputs = [*call(tensors, **first), *call(others, **second)]
        return [*outputs, *(x * 2 for x in outputs)]

    begin = all_lengths[0]
    graph, outputs = capture(lambda: model(begin, begin), auto_dispatch_capture=True)
    seen: list[list[Tensor]] = []
    for first in all_lengths:
        for second in (first, begin):
            seen.append(model(first, second))
            update = [{names.get(key, key): x for key, x in given.items()}
                      for given in (first, second)]  # fmt: skip
            graph.update(cpu_update_input=per_launch(name, update))
            for _ in range(2):
                assert_replays(graph, outputs, seen[-1])
    assert not same_bytes(seen[0], seen[-2])


def per_launch(name: str, update: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A differentiated call is two, forward and backward, layer by layer."""
    return [x for x in update for _ in range(2)] if "gradient" in name else update


def memory_of(out: Tensor, workspace: int = 0) -> dict[str, Any]:
    """The memory that a launch of one's own writes."""
    return {"workspace": torch.empty(workspace, dtype=torch.uint8, device="npu"),
            "out": [torch.empty_like(out)]}  # fmt: skip


def launch(tensors: list[Tensor], lengths: list[int], memory: dict[str, Any]) -> None:
    torch.ops.ascend.prompt_flash_attention.relaunch(
        *tensors, num_heads=2, layout="BSND", scale_value=0.125,
        actual_seq_lengths_key=torch.tensor(lengths), **memory,
    )  # fmt: skip


def launch_fused(tensors: list[Tensor], lengths: list[int], memory: dict[str, Any]) -> None:
    """torch_npu's own."""
    torch_npu.npu_fused_infer_attention_score.out(
        *tensors, num_heads=2, input_layout="BSND", scale=0.125, actual_seq_lengths=[8, 8],
        actual_seq_lengths_kv=lengths, workspace=memory["workspace"],
        out=[*memory["out"], torch.empty(1, device="npu")],
    )  # fmt: skip


@pytest.mark.parametrize("call", [launch, launch_fused])
def test_a_replay_waits_for_the_update_that_is_behind_it(call: Callable[..., None]) -> None:
    """As a serving engine does it: groups of its own, and an event that the graph waits for."""
    tensors = dense()
    memory = memory_of(tensors[0], 4096)
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    ready = torch.npu.ExternalEvent()
    ready.record(side)  # makes it
    ready.reset(side)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        stream = torch.npu.current_stream()
        ready.wait(stream)
        ready.reset(stream)
        torch.npu.graph_task_group_begin(stream)
        call(tensors, [8, 8], memory)
        group = torch.npu.graph_task_group_end(stream)
        (out,) = memory["out"]
        doubled = out * 2
    for lengths in ([3, 5], [8, 8], [1, 7]):
        other = memory_of(tensors[0], 4096)
        call(tensors, lengths, other)
        (expected,) = other["out"]
        poison([out, doubled])
        graph.replay()
        assert not main.query()
        with pytest.raises(RuntimeError, match="waits for an event that nothing has recorded"):
            main.synchronize()
        with torch.npu.stream(side):
            torch.npu.graph_task_update_begin(side, group)
            call(tensors, lengths, memory)
            torch.npu.graph_task_update_end(side)
            ready.record(side)
        assert main.query()
        assert same_bytes([out, doubled], [expected, expected * 2])


def test_a_call_that_needs_more_workspace_than_it_had() -> None:
    """The memory behind it is another's by then."""
    tensors = dense()
    memory = memory_of(tensors[0])
    launch(tensors, [8, 8], memory)
    assert memory["workspace"].numel() > 1
    memory["workspace"] = memory["workspace"][1:]
    with pytest.raises(ValueError, match=r"prompt_flash_attention: workspace: expected \d+ bytes"):
        launch(tensors, [8, 8], memory)


def test_outputs_that_do_not_fit() -> None:
    tensors = dense()
    for out, message in (
        ([], "expected 1 tensors, got 0"), ([tensors[0].float()], "out: expected dtype"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            launch(tensors, [8, 8], {**memory_of(tensors[0]), "out": out})


def strided(x: Tensor) -> Tensor:
    return torch.stack((x, torch.zeros_like(x)), -1)[..., 0]


def test_strided_tensors() -> None:
    """The function takes none: a replay copies them first, also after an update."""
    tensors = dense()
    views = [strided(x) for x in tensors]
    graph, outputs = capture(lambda: prompt(views, **{KEY: [3, 5]}), auto_dispatch_capture=True)
    for lengths in ([3, 5], [8, 2]):
        for x, view in zip(tensors, views, strict=True):
            x.mul_(0.5)
            view.copy_(x)
        graph.update(cpu_update_input=[{KEY: lengths}])
        assert_replays(graph, outputs, prompt(tensors, **{KEY: lengths}))
    # A launch of one's own has nowhere to copy them to.
    with pytest.raises(NotImplementedError, match="expected contiguous tensors"):
        launch(views, [3, 5], memory_of(tensors[0]))


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "sink"), (torch.half, "query_rope")])
def test_what_the_launch_computes_is_not_updated(dtype: torch.dtype, name: str) -> None:
    """No function of CANN takes a sink beside float32, or ropes beside float16."""
    x = torch.ones(8, 2, 16, dtype=dtype, device="npu")
    extra = {"query_rope": x, "key_rope": x}
    if name == "sink":
        extra = {"sink": torch.ones(2, device="npu")}
    statistics = [torch.zeros(8, 2, 8, device="npu") for _ in range(2)]
    out = [torch.zeros_like(x), *statistics]
    with pytest.raises(
        NotImplementedError, match=f"{name}: expected None on this device in a call"
    ):
        torch.ops.ascend.flash_attention_score.relaunch(
            x, x, x, num_heads=2, layout="TND", scale_value=1.0,
            actual_seq_lengths_query=torch.tensor([8]), actual_seq_lengths_key=torch.tensor([8]),
            workspace=torch.empty(0, dtype=torch.uint8, device="npu"),
            out=out, **extra,
        )  # fmt: skip
    assert not any(x.any() for x in out)


def test_a_sink_outside_tnd_is_not_updated_beside_softmax_lse() -> None:
    """The marks of rows without keys and of rows behind a sequence are the same."""
    tensors = dense()
    out = [torch.zeros_like(tensors[0]), torch.zeros(2, 2, 8, 1, device="npu")]
    with pytest.raises(NotImplementedError, match="return_softmax_lse: expected False beside a"):
        torch.ops.ascend.fused_infer_attention_score.relaunch(
            *tensors, num_heads=2, layout="BSND", scale_value=1.0,
            actual_seq_lengths_key=torch.tensor([8, 3]), return_softmax_lse=True, out=out,
            sink=tensors[0][0, 0, :, 0].contiguous(),
            workspace=torch.empty(0, dtype=torch.uint8, device="npu"),
        )  # fmt: skip


def test_calls_without_lengths_have_nothing_to_update() -> None:
    tensors = dense()
    graph, outputs = capture(lambda: prompt(tensors), auto_dispatch_capture=True)
    # torch_npu that does not ask a handler takes every call of its operator to have lengths.
    count = 0 if "should_handle" in inspect.getsource(torch_npu.npu.graphs) else 1
    with pytest.raises(RuntimeError, match=f"{count} operators"):
        graph.update(cpu_update_input=[{KEY: [3, 5]}, {KEY: [3, 5]}])
    assert_replays(graph, outputs, prompt(tensors))


# Several streams in one capture.


def test_a_stream_that_waits_for_the_captured_one_is_captured() -> None:
    """Its work runs in every replay, and none of it before."""
    tensors, side = dense(), torch.npu.Stream()
    lengths = {KEY: [3, 5]}
    joined: list[bool] = []

    def step() -> list[Tensor]:
        main = torch.npu.current_stream()
        halves = [x * 0.5 for x in tensors]
        side.wait_stream(main)
        with torch.npu.stream(side):
            joined.append(torch.npu.is_current_stream_capturing())
            beside = prompt(halves, **lengths)
        here = prompt(tensors, **lengths)
        main.wait_stream(side)
        return [beside[0] + here[0]]

    graph, outputs = capture(step)
    for factor in (0.5, 3):
        for x in tensors:
            x.mul_(factor)
        assert_replays(graph, outputs, step())
    assert joined == [True, False, False]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("torch.npu.synchronize()", "while a graph is being captured"),
        ("event.wait(); x * 2", "is captured and waits for an event that was recorded outside"),
        ("fork(); aside()", r"stream \d+ has work in the capture"),
        ("fork(); aside(); join(); aside()", r"stream \d+ has work in the capture"),
    ],
    ids=["host", "event", "no join", "after the join"],
)
def test_what_no_capture_can_have(code: str, message: str) -> None:
    """In a process of its own: the task queue has failed then, or captures nothing more."""
    output, _ = run_in_new_process(f"""
import torch, torch_npu
x, event, side = torch.ones(4).npu(), torch.npu.Event(), torch.npu.Stream(); event.record()
fork = lambda: side.wait_stream(torch.npu.current_stream())
join = lambda: torch.npu.current_stream().wait_stream(side)
def aside():
    with torch.npu.stream(side): x * 2
try:
    with torch.npu.graph(torch.npu.NPUGraph()):
        {code}
except RuntimeError as error:
    while error:
        print(str(error).replace("\\n", " "))
        error = error.__context__
""")
    assert re.search(message, output), output
