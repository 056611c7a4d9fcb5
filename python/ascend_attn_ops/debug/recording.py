"""Write calls of the operators to files, and run them again elsewhere.

A file is one of safetensors: the tensors, and in its metadata a JSON text with all else. Nothing in
it is executed.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ascend_attn_ops._core import library
from ascend_attn_ops._core.arguments import bytes_in, refuse_traces, shown, wrong
from ascend_attn_ops._core.device_limits import device_in_force, limits
from ascend_attn_ops._core.sparse_modes import COMPRESSED_MODES, compressed_mask
from ascend_attn_ops.debug.comparison import difference, not_comparable, not_readable, on_the_host
from ascend_attn_ops.debug.observed_calls import Call, CallObserver
from ascend_attn_ops.debug.report import version
from ascend_attn_ops.reference.bounds import BOUNDS
from ascend_attn_ops.reference.call import Sample, bytes_of, sample_of

_NAME = "ascend_attn_ops.record"
_READ = "ascend_attn_ops.debug.recording.replay"

When = Literal["differs", "raises", "always"]

_FORMAT = 1
_METADATA = "ascend_attn_ops"  # of the safetensors file, the JSON text
# The largest storage that a file may ask for, as a multiple of a tensor's elements.
_MOST_GAPS = 16


@contextmanager
def record(folder: str | Path, when: When = "raises", limit: str = "200MB") -> Iterator[list[Path]]:
    """Write calls of the operators in the block to files that `replay` runs anywhere.

    A file holds the arguments of one call, what came out, the limits in force, and the versions of
    torch, torch_npu and CANN. It needs the package ``safetensors``. Each recorded call waits for
    the device. An error that an operator raises in the block names its file.

    Args:
        folder: where to write; made if needed.
        when: ``"raises"``, ``"differs"`` (from the reference, as `compare` finds it) or
            ``"always"``.
        limit: of all files of the block, with ``KB``, ``MB`` or ``GB``; later calls only warn.

    Returns:
        A context manager that yields a list of the files written so far.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: `when` or `limit` is none of these.
        RuntimeError: the block is entered, or an operator called, in a graph's capture, or the
            block is traced by torch.compile.

    Example:
        >>> import tempfile, torch, ascend_attn_ops
        >>> from ascend_attn_ops.debug.recording import replay
        >>> query = torch.randn(1, 6, 4, 64, dtype=torch.bfloat16)
        >>> key, value = torch.randn(2, 1, 9, 2, 64, dtype=torch.bfloat16)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with ascend_attn_ops.record(folder, when="always") as files:
        ...         out, *_ = ascend_attn_ops.flash_attention_score(
        ...             query, key, value, num_heads=4, layout="BSND", sparse_mode=3)
        ...     outcome = replay(files[0])
        >>> len(files), outcome.error, outcome.same_as_recorded
        (1, None, True)
    """
    refuse_traces(_NAME)
    if when not in ("differs", "raises", "always"):
        raise wrong(ValueError, _NAME, "when", "'differs', 'raises' or 'always'", shown(when))
    most = bytes_in(limit)
    if most is None:
        raise wrong(ValueError, _NAME, "limit", "a size such as '200MB'", shown(limit))
    _safetensors_of(_NAME)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with _Recording(_NAME, path, when, most) as recording:
        yield recording.files


def _safetensors_of(function: str) -> Any:
    """The package; an error of `function` where it is missing."""
    try:
        import safetensors.torch
    except ImportError as error:
        text = "the files need the package safetensors: pip install safetensors"
        raise ImportError(f"{function}: {text}") from error
    return safetensors


class _Recording(CallObserver):
    def __init__(self, name: str, folder: Path, when: When, most: int) -> None:
        super().__init__(name)
        self.files: list[Path] = []
        self._folder, self._when, self._left = folder, when, most
        self._full = False

    def observe(self, call: Call, run: Callable[[], Any]) -> Any:
        before, unreadable = call.sample, not_readable(call.sample)
        bounds = BOUNDS[before.operator]
        if bounds.in_place and unreadable is None:
            before = on_the_host(before)
        try:
            outputs = run()
        except Exception as error:
            if unreadable is None:
                file = self._write(call, before, {}, raised=_text(error))
                if file is not None:
                    _add_note(error, f"the call was recorded in {file}")
            raise
        if self._when == "always":
            self._write(call, before, bounds.results(call.sample, outputs))
        elif self._when == "differs" and not_comparable(before) is None:
            text = difference(before, call.sample, outputs, None)
            if text is not None:
                self._write(call, before, bounds.results(call.sample, outputs), differs=text)
        return outputs

    def _write(
        self, call: Call, before: Sample, outputs: Mapping[str, Tensor], **found: str
    ) -> Path | None:
        if self._full:
            return None
        tensors, described = _described(on_the_host_once(before))
        tensors |= {f"outputs.{name}": x.detach().cpu().contiguous() for name, x in outputs.items()}
        size = sum(x.nbytes for x in tensors.values())
        if size > self._left:
            self._end(f"limit: {call} takes {size / 10**6:.0f} MB")
            return None
        device = device_in_force()
        content = {
            "format": _FORMAT,
            "operator": before.operator,
            "arguments": described,
            "limits": None if device is None else [device.product, device.cann],
            "place": call.place,
            "versions": _versions(),
            **found,
        }
        file = self._folder / f"{len(self.files):04}-{before.operator}.safetensors"
        while file.exists():
            file = file.with_name(f"{file.stem}_.safetensors")
        library = _safetensors_of(self._name)
        try:
            library.torch.save_file(tensors, file, {_METADATA: json.dumps(content)})
        except (OSError, RuntimeError, library.SafetensorError) as error:
            # The program goes on, or raises its own error.
            self._end(f"folder: {_text(error)}")
            return None
        self._left -= size
        self.files.append(file)
        return file

    def _end(self, reason: str) -> None:
        self._full = True
        warnings.warn(f"{self._name}: {reason}; from here on nothing is recorded", stacklevel=5)


def on_the_host_once(sample: Sample) -> Sample:
    """With the strides that its tensors have."""
    with torch.no_grad():
        return sample.map(lambda x: x.detach().cpu())


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _add_note(error: Exception, text: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])


def _versions() -> dict[str, str]:
    found = {
        "ascend_attn_ops": version(),
        "torch": torch.__version__,
    }
    npu = library.npu_module()
    if npu is not None:
        found |= {"torch_npu": metadata.version("torch_npu")}
        found |= {"CANN": npu.cann_version(), "SoC": npu.soc_name()}
    return found


def _described(sample: Sample) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a call, each once, and its arguments, with {"tensor": name} in their place."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def describe(name: str, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [describe(f"{name}.{i}", item) for i, item in enumerate(x)]
        if not isinstance(x, Tensor):
            return x
        if name == "atten_mask" and _is_compressed(x, sample.arguments["sparse_mode"]):
            return {"compressed_mask": True}
        if id(x) not in names:
            names[id(x)] = name
            tensors[name] = x.contiguous().clone()
        return {"tensor": names[id(x)], "stride": list(x.stride())}

    described = {name: describe(name, x) for name, x in sample.arguments.items()}
    return tensors, described


def _is_compressed(x: Tensor, sparse_mode: int) -> bool:
    """Whether it is the mask that the mode has by default: 4 MiB, which no file needs."""
    if sparse_mode not in COMPRESSED_MODES or x.dtype != torch.bool:
        return False
    return torch.equal(x, compressed_mask(sparse_mode, x.device))


@dataclass(frozen=True)
class Recorded:
    """A call as a file has it."""

    sample: Sample
    outputs: dict[str, Tensor]
    product: str | None
    cann: str | None
    raised: str | None
    place: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Replayed:
    """The outcome of a replayed call."""

    recorded: Recorded
    error: str | None  # what it raised
    difference: str | None  # from the reference
    same_as_recorded: bool | None  # bit for bit; None where nothing can be compared

    def __str__(self) -> str:
        call = self.recorded
        lines = [f"{call.sample.operator}, called at {call.place}"]
        if call.raised is not None:
            lines.append(f"  recorded: {call.raised}")
        if self.error is not None:
            lines.append(f"  here: {self.error}")
            return "\n".join(lines)
        bounds = self.difference or "within the bounds"
        lines.append("  here, against the reference: " + bounds.replace("\n", "\n    "))
        if self.same_as_recorded is not None:
            same = "the recorded bits" if self.same_as_recorded else "other bits than recorded"
            lines.append(f"  here: {same}")
        return "\n".join(lines)


def read(file: str | Path) -> Recorded:
    """Read a recorded call, and check all that it names.

    Raises:
        ValueError: the file is no recorded call.
        ImportError: safetensors is not installed.
    """
    library = _safetensors_of(_READ)
    try:
        with library.safe_open(str(file), framework="pt") as opened:
            content = json.loads((opened.metadata() or {})[_METADATA])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if content["format"] != _FORMAT:
            raise ValueError(f"it has format {content['format']}, and this version reads {_FORMAT}")
        return _recorded(content, tensors)
    except (KeyError, TypeError, AttributeError, ValueError, library.SafetensorError) as error:
        text = f"expected a file of ascend_attn_ops.record, but {type(error).__name__}: {error}"
        raise ValueError(f"{_READ}: file: {text}") from error


def _recorded(content: dict[str, Any], tensors: Mapping[str, Tensor]) -> Recorded:
    given = dict(content["arguments"])
    built: dict[str, Tensor] = {}

    def value(x: Any) -> Any:
        if isinstance(x, list):
            return [value(item) for item in x]
        if not isinstance(x, dict):
            return x
        if "compressed_mask" in x:
            return compressed_mask(given["sparse_mode"], torch.device("cpu"))
        name = x["tensor"]
        if name not in built:
            built[name] = _with_strides(tensors[name], x["stride"])
        return built[name]

    arguments = {name: value(x) for name, x in given.items()}
    product, cann = content["limits"] or (None, None)
    return Recorded(
        sample_of(str(content["operator"]), "", arguments),
        {n.removeprefix("outputs."): x for n, x in tensors.items() if n.startswith("outputs.")},
        product,
        cann,
        content.get("raised"),
        str(content["place"]),
        {str(k): str(v) for k, v in content["versions"].items()},
    )


def _with_strides(x: Tensor, stride: list[int]) -> Tensor:
    """The same elements, with the recorded gaps between them if these are few and none overlap."""
    if len(stride) != x.dim() or not all(isinstance(n, int) and n >= 0 for n in stride):
        raise ValueError(f"strides {stride} of a tensor of shape {list(x.shape)}")
    if not x.numel():
        return x
    size = 1 + sum((n - 1) * step for n, step in zip(x.shape, stride, strict=True))
    end = 1
    for step, n in sorted(zip(stride, x.shape, strict=True)):
        if n > 1:
            if step < end:
                return x
            end = step * (n - 1) + end
    if size > _MOST_GAPS * x.numel():
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype).copy_(x)


def replay(file: str | Path, device: str = "cpu") -> Replayed:
    """Run a call that :func:`ascend_attn_ops.record` wrote, under its limits, and compare it.

    Args:
        file: one that `record` wrote.
        device: ``"cpu"``, ``"npu"``, ``"npu:1"``, ...

    Returns:
        A `Replayed` with ``error`` (what the call raised), ``difference`` (from the reference),
        ``same_as_recorded`` and ``recorded``. Printed, it says all of this.

    Raises:
        ValueError: the file is no recorded call.
        ImportError: safetensors is not installed.
    """
    recorded = read(file)
    sample = recorded.sample.clone() if device == "cpu" else recorded.sample.to(device)
    before = recorded.sample
    try:
        with limits(recorded.product, recorded.cann):  # type: ignore[arg-type]  # refused there
            outputs = sample.call(torch.ops.ascend)
            named = {
                name: x.cpu()
                for name, x in BOUNDS[sample.operator].results(sample, outputs).items()
            }
    except Exception as error:
        same = None if recorded.raised is None else _text(error) == recorded.raised
        return Replayed(recorded, _text(error), None, same)
    text = difference(before, sample, outputs, None) if not_comparable(before) is None else None
    same = None
    if recorded.outputs:
        same = all(
            named[name].shape == x.shape and torch.equal(bytes_of(named[name]), bytes_of(x))
            for name, x in recorded.outputs.items()
        )
    return Replayed(recorded, None, text, same)
