"""ascend_attn_ops.record: its files, and what runs them again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ascend_attn_ops as ops
import pytest
import torch
from ascend_attn_check.__main__ import main
from ascend_attn_check.samples import OPERATORS, Operator
from ascend_attn_check.samples.masks import compressed_mask
from ascend_attn_ops._core.arguments import bytes_in
from ascend_attn_ops.debug import recording
from ascend_attn_ops.debug.recording import replay
from ascend_attn_ops.reference.call import bytes_of
from support import fresh
from support.freed import freed

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from test_comparison import KEY, QUERY, Faulty, attend  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_limits")

NO_RECORD = re.escape("expected a file of ascend_attn_ops.record")

REPLAY = (
    "import sys; from ascend_attn_check.__main__ import main; "
    'sys.exit(main(["--device", "cpu", "--replay", sys.argv[1]]))'
)


def in_new_process(code: str, argument: Path) -> fresh.Ended:
    start = f"import sys, ascend_attn_ops\nsys.argv[1:] = [{str(argument)!r}]\n"
    return fresh.run(f"{start}ascend_attn_ops.set_limits(None)\n{code}")


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The file of one call."""
    with ops.record(tmp_path, when="always") as files:
        attend()
    return files[0]


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda x: x.name)
def test_a_recorded_call_gives_the_same_bits_again(operator: Operator, tmp_path: Path) -> None:
    cases = [x for x in operator.recipes if getattr(x.case, "scatter", "") != "Nct"][:3]
    with ops.record(tmp_path, when="always") as files:
        for recipe in cases:
            recipe.make(torch.bfloat16).clone().call(torch.ops.ascend)
    assert len(files) == len(cases)
    for file in files:
        outcome = replay(file)
        assert outcome.error is None
        assert outcome.difference is None
        assert outcome.same_as_recorded


def test_an_error_names_its_file_which_raises_it_again_in_a_fresh_process(tmp_path: Path) -> None:
    with ops.record(tmp_path) as files, pytest.raises(ValueError, match="num_heads") as raised:
        attend(num_heads=3)
    (file,) = files
    shown = [str(raised.value), *getattr(raised.value, "__notes__", ())]
    assert any(str(file) in line for line in shown)
    done = in_new_process(REPLAY, file)
    assert done.status == 1
    lines = done.out.splitlines()[1:]
    assert lines[0].startswith("flash_attention_score, called at "), done.err
    assert lines[1].removeprefix("  recorded: ") == lines[2].removeprefix("  here: ")
    assert "num_heads" in lines[2]


@pytest.mark.parametrize(
    ("operator", "result"), [("flash_attention_score", "out"), ("flash_attention_score_grad", "dq")]
)
def test_a_difference_is_recorded_and_replays_to_the_same(
    operator: str, result: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def recorded_step() -> list[Path]:
        with ops.record(tmp_path, when="differs") as files:
            attend(QUERY.clone().requires_grad_()).float().square().mean().backward()
        return files

    assert not recorded_step()
    with Faulty(operator, 0, 1):
        (file,) = recorded_step()
        outcome = replay(file)
        assert main(["--device", "cpu", "--replay", str(file)]) == 1
    where, difference, same = capsys.readouterr().out.split("\n  here")[0:3]
    assert where.splitlines()[1].startswith(f"{operator}, called at ")
    text = difference.removeprefix(", against the reference: ").replace("\n    ", "\n")
    with safetensors.safe_open(str(file), framework="pt") as opened:
        recorded = json.loads(opened.metadata()[recording._METADATA])["differs"]
    assert text == recorded == outcome.difference
    assert recorded.startswith(f"{result}: 1 of ")
    assert same.strip() == ": the recorded bits"
    assert outcome.same_as_recorded
    outcome = replay(file)  # here the operator is right
    assert outcome.difference is None
    assert outcome.same_as_recorded is False


def test_the_command_says_which_files_are_none(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--replay", str(recorded), "--device", "cpu"]) == 0
    assert "here, against the reference: within the bounds" in capsys.readouterr().out
    other = tmp_path / "other"
    other.write_text("text")
    assert main(["--replay", str(other), str(tmp_path / "none")]) == 1
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        str(other), str(tmp_path / "none"),
    ]  # fmt: skip


def test_limits_come_with_the_call(tmp_path: Path) -> None:
    with (
        ops.limits("A2", "9.0"),
        ops.record(tmp_path) as files,
        pytest.raises(TypeError, match="query"),
    ):
        attend(QUERY.double(), KEY.double())
    outcome = replay(files[0])
    assert (outcome.recorded.product, outcome.recorded.cann) == ("A2", "9.0")
    assert outcome.error == outcome.recorded.raised
    assert outcome.same_as_recorded


def test_strides_and_tensors_given_twice_are_kept(tmp_path: Path) -> None:
    query = torch.stack((QUERY, torch.full_like(QUERY, torch.nan)), -1)[..., 0]
    with ops.record(tmp_path, when="always") as files:
        attend(query, KEY.expand(1, 9, 2, 64))
        attend(query.transpose(1, 2)[:, :, :1].transpose(1, 2).contiguous(), KEY)
    inputs = replay(files[0]).recorded.sample.inputs
    assert inputs["key"] is inputs["value"]
    assert inputs["query"].stride() == query.stride()
    assert torch.equal(bytes_of(inputs["query"]), bytes_of(query))


def test_a_cache_is_recorded_as_it_was(tmp_path: Path) -> None:
    sample = OPERATORS["scatter_pa_kv_cache_"].small_sample().clone()
    before = sample.tensors["key_cache"].clone()
    with ops.record(tmp_path, when="always") as files:
        sample.call(torch.ops.ascend)
    recorded = replay(files[0]).recorded
    assert torch.equal(bytes_of(recorded.sample.tensors["key_cache"]), bytes_of(before))
    written = sample.tensors["key_cache"]
    assert torch.equal(bytes_of(recorded.outputs["key_cache"]), bytes_of(written))


def test_backward_is_recorded(tmp_path: Path) -> None:
    query = QUERY.clone().requires_grad_()
    with ops.record(tmp_path, when="always") as files:
        attend(query).sum().backward()
    assert [x.name.partition("-")[2] for x in files] == [
        "flash_attention_score.safetensors", "flash_attention_score_grad.safetensors",
    ]  # fmt: skip
    assert all(replay(x).same_as_recorded for x in files)


def test_a_size_means_one_thing() -> None:
    """In the command, too."""
    sizes = {"20KB": 20_000, "200MB": 2 * 10**8, "1.5 GB": 15 * 10**8, "2gb": None, "2": None}
    assert {x: bytes_in(x) for x in sizes} == sizes


def test_files_stay_within_the_limit(tmp_path: Path) -> None:
    with ops.record(tmp_path, when="always", limit="20KB") as files:
        attend()
        attend(sparse_mode=6, prefix=[4], atten_mask=compressed_mask(6, torch.bool))  # 3 MiB
        with pytest.warns(UserWarning, match="record: limit: flash_attention_score at ") as seen:
            attend()
        attend()  # without a second warning
    assert len(files) == 2
    assert len(seen) == 1
    assert sum(x.stat().st_size for x in files) < 24 * 2**10


@pytest.mark.parametrize("when", ["raises", "differs"])
def test_what_cannot_be_recorded_raises_its_own_error(when: Any, tmp_path: Path) -> None:
    """The error of the plain call: torch's own functions would crash or raise others."""
    cache, keys = torch.zeros(4, 16, 1, 64), torch.randn(2, 1, 64)
    calls = [
        (lambda: attend(freed(QUERY)), ValueError, "query: expected a storage that holds"),
        (lambda: attend(QUERY.to_sparse()), NotImplementedError, "query: expected a dense tensor"),
        (lambda: ops.scatter_pa_kv_cache_(keys, freed(cache), torch.tensor([5, 63])),
         ValueError, "key_cache: expected a storage that holds"),
    ]  # fmt: skip
    for call, error, message in calls:
        for block in (ops.record(tmp_path, when), ops.compare()):
            with block as found, pytest.raises(error, match=message):
                call()
            assert not (found if isinstance(found, list) else found.differences)
    folder = tmp_path / "gone"
    with ops.record(folder, when="always") as files:
        folder.rmdir()
        with pytest.warns(UserWarning, match=r"record: folder: .*; from here on nothing is"):
            attend()
        with pytest.raises(ValueError, match="num_heads"):
            attend(num_heads=3)
    assert not files


def test_another_block_keeps_the_files_of_the_first(tmp_path: Path) -> None:
    kept = []
    for _ in range(2):
        with ops.record(tmp_path, when="always") as files:
            attend()
        kept += files
    assert len(set(kept)) == 2


def test_a_file_names_no_place_outside_of_the_program(recorded: Path, tmp_path: Path) -> None:
    content = recorded.read_bytes()
    for text in (str(Path.home()), str(tmp_path), __import__("socket").gethostname()):
        assert text.encode() not in content


def changed(file: Path, **changes: Any) -> None:
    """Other JSON beside the same tensors."""
    with safetensors.safe_open(str(file), framework="pt") as opened:
        content = json.loads(opened.metadata()[recording._METADATA])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    content |= changes
    metadata = {recording._METADATA: json.dumps(content)}
    safetensors.save_file(tensors, file, metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format 2, and this version reads 1"),
        ({"operator": "system"}, "there is no operator 'system'"),
        ({"operator": "attention_update"}, "has no argument"),
        ({"arguments": {"query": 1}}, "needs an argument key, value"),
        ({"arguments": None}, "TypeError"), ({"limits": ["A2"]}, "ValueError"),
        ({"arguments": {"query": {"tensor": "else", "stride": []}}}, "KeyError"),
    ],
    ids=str,
)  # fmt: skip
def test_another_file_is_refused(recorded: Path, changes: dict[str, Any], message: str) -> None:
    changed(recorded, **changes)
    with pytest.raises(ValueError, match=NO_RECORD) as raised:
        replay(recorded)
    assert message in str(raised.value)


@pytest.mark.parametrize("stride", [[1, 2**40, 64, 1], [-1, 1, 1, 1], [1], [1.5] * 4, None])
def test_wrong_strides_take_no_memory(recorded: Path, stride: Any) -> None:
    with safetensors.safe_open(str(recorded), framework="pt") as opened:
        content = json.loads(opened.metadata()[recording._METADATA])
    content["arguments"]["query"]["stride"] = stride
    changed(recorded, arguments=content["arguments"])
    if stride is not None and stride[1:2] == [2**40]:
        assert replay(recorded).same_as_recorded  # without the gaps
    else:
        with pytest.raises(ValueError, match=NO_RECORD):
            replay(recorded)


def test_bytes_of_something_else_are_refused(recorded: Path) -> None:
    whole = recorded.read_bytes()
    for content in (b"", b"PK\x03\x04", whole[:100], whole[:-1], b"\xff" * 64):
        recorded.write_bytes(content)
        with pytest.raises(ValueError, match=NO_RECORD):
            replay(recorded)
