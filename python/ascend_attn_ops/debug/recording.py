"""Write calls of the operators to files, and run them again elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ascend_attn_ops._core.arguments import bytes_in, refuse_traces, shown, wrong

if TYPE_CHECKING:
    from ascend_attn_ops.debug.recorded_calls import Replayed, When

_NAME = "ascend_attn_ops.record"


@contextmanager
def record(folder: str | Path, when: When = "raises", limit: str = "200MB") -> Iterator[list[Path]]:
    """Write calls of the operators in the block to files that `replay` runs anywhere.

    A file holds the arguments of one call, what came out, the limits in force, and the versions of
    torch, torch_npu and CANN; neither host nor user. It needs the package ``safetensors``. An
    error that an operator raises in the block names its file.

    Each recorded call waits for the device. Only errors raised by the call itself are seen: a
    device that fails later raises elsewhere.

    Args:
        folder: where to write; made if needed.
        when: ``"raises"``, ``"differs"`` (from the reference, as `compare` finds it) or
            ``"always"``.
        limit: of all files of the block, with ``KB``, ``MB`` or ``GB``. The first call beyond it
            is not written, with a warning, nor are those after it.

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
        >>> outcome.error, outcome.difference, outcome.same_as_recorded
        (None, None, True)
    """
    refuse_traces(_NAME)
    if when not in ("differs", "raises", "always"):
        raise wrong(ValueError, _NAME, "when", "'differs', 'raises' or 'always'", shown(when))
    most = bytes_in(limit)
    if most is None:
        raise wrong(ValueError, _NAME, "limit", "a size such as '200MB'", shown(limit))
    # Imported when used: the samples take as long as the package.
    from ascend_attn_ops.debug.recorded_calls import Recording, safetensors_of

    safetensors_of(_NAME)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with Recording(_NAME, path, when, most) as recording:
        yield recording.files


def replay(file: str | Path, device: str = "cpu") -> Replayed:
    """Run a recorded call under the limits it had, and compare what comes out.

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
    from ascend_attn_ops.debug import recorded_calls

    return recorded_calls.replay(file, device)
