"""Puts the simulated CANN under the torch_npu of this process."""

from __future__ import annotations

import atexit
import ctypes
import glob
import importlib
import os
import sys
from pathlib import Path

from cann_simulator import _built_with, _report
from cann_simulator._environment import CANN, LIBRARIES, environment
from cann_simulator._products import DEFAULT
from cann_simulator._torch import AUTOLOAD

# In this order: the others need functions of the first.
_LIBRARIES = (
    "ascendcl", "hccl", "hcomm", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel",
    "opapi", "nnopbase", "atb",
)  # fmt: skip
_DESCRIPTION = ("CANN_SIM_DEVICES", "CANN_SIM_SOC", "CANN_SIM_VERSION", "TASK_QUEUE_ENABLE")


def is_running() -> bool:
    """Return whether the CANN of this process is the simulated one."""
    try:
        library = ctypes.CDLL("libascendcl.so", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return hasattr(library, "cann_sim_waits")


def description() -> str:
    """Return what this process, or one with its environment, simulates."""
    devices = int(os.environ["CANN_SIM_DEVICES"])
    soc, cann = os.environ["CANN_SIM_SOC"], os.environ["CANN_SIM_VERSION"]
    return f"{devices} simulated {soc} with CANN {cann}"


def start(
    *,
    devices: int = 2,
    product: str = DEFAULT,
    cann: str = "9.1",
    task_queue: int = 1,
    streams: str = "lenient",
    calls: str | Path | None = None,
    report: bool = False,
    force: bool = False,
) -> None:
    """Simulate NPUs in this process, and in those that it starts; load torch_npu on them.

    Must come before torch_npu is imported. With torch_npu installed, ``import torch`` imports it:
    import this package first, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0. A process that is simulated
    already, because another started it, stays as it is.

    Args:
        devices: How many NPUs there are, up to 16.
        product: A product, as "A3", or the name of a SoC, as "Ascend910B2".
        cann: The release of CANN: "8.5", "9.0" or "9.1".
        task_queue: TASK_QUEUE_ENABLE of torch_npu: 0, 1 or 2.
        streams: "strict" makes work on a stream an error that touches memory which work on another
            has touched, where nothing orders the two: no event that the stream waits for, no host
            that has waited. A copy to the host arrives when the host waits for it.
        calls: A file that gets every call of an aclnn function as a line of JSON, also those of the
            processes that this one starts.
        report: Write to standard error, at the end, which operators ran, where and how often, and
            what was refused.
        force: Start even where there is a real CANN or an NPU.

    Raises:
        RuntimeError: There is a real CANN or an NPU here, or torch_npu is imported already.
        ImportError: torch_npu is missing, or the libraries were built with another version of it;
            or the version of ascend_attn_ops is another.
    """
    wanted = environment(
        devices=devices,
        product=product,
        cann=cann,
        task_queue=task_queue,
        streams=streams,
        calls=calls,
        report=report,
    )
    if is_running():
        different = [name for name in _DESCRIPTION if os.environ.get(name) != wanted[name]]
        if different:
            what = ", ".join(f"{name}={os.environ.get(name)}" for name in different)
            raise RuntimeError(f"this process runs on a simulated CANN already, with {what}")
        return
    _built_with.check()
    if "torch_npu" in sys.modules:
        raise RuntimeError(
            "torch_npu is imported already: call cann_simulator.start() before anything "
            "imports it. `import torch` does, unless cann_simulator is imported before it"
        )
    if not force and (found := _real_cann()):
        raise RuntimeError(
            f"there is a real CANN here ({found}), and a simulation would hide it; use force=True "
            "(--force) to simulate all the same"
        )
    # A user who switched the automatic import off wants it off in child processes, too.
    wanted[AUTOLOAD] = os.environ.get(AUTOLOAD, "1")
    os.environ.update(wanted)
    if calls is not None:
        Path(calls).write_text("")
    print(
        f"cann_simulator: {description()}, computed by this machine's processor; "
        "neither numbers nor times are those of an NPU",
        file=sys.stderr,
        flush=True,
    )
    for name in _LIBRARIES:
        # Under the names by which torch_npu's own libraries need them, and in their sight.
        ctypes.CDLL(str(LIBRARIES / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
    if report:
        # Before torch_npu registers what empties its queues at exit: that comes first then.
        atexit.register(_report.write)
    importlib.import_module("torch_npu")
    # Some releases switch it off while they are imported, and on only where torch imports them.
    os.environ[AUTOLOAD] = wanted[AUTOLOAD]
    if "ascend_attn_ops" in sys.modules:
        # It has been imported where there was no NPU.
        importlib.import_module("ascend_attn_ops._core.library").load()


def _real_cann() -> str | None:
    """Return what says that this machine has a CANN, or an NPU, of its own."""
    for device in sorted(glob.glob("/dev/davinci*")):
        return device
    folders = [
        *(
            Path(os.environ[name], "lib64")
            for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
            if os.environ.get(name)
        ),
        *(Path(x) for x in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if x),
    ]
    for folder in folders:
        library = folder / "libascendcl.so"
        if library.exists() and CANN not in library.resolve().parents:
            return str(library)
    return None
