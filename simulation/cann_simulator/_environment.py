"""The environment of a process that runs on the simulated CANN."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cann_simulator._products import (
    DEFAULT,
    check_version,
    device_of,
    missing_functions,
    operators,
)
from cann_simulator._torch import AUTOLOAD

# In the place of an installed CANN.
CANN = Path(__file__).parent / "cann"
LIBRARIES = CANN / "lib64"
MOST_DEVICES = 16
STREAMS = ("lenient", "strict")


def environment(
    *,
    devices: int = 2,
    product: str = DEFAULT,
    cann: str = "9.1",
    task_queue: int = 1,
    streams: str = "lenient",
    without: Iterable[str] = (),
    calls: str | Path | None = None,
    report: bool = False,
) -> dict[str, str]:
    """Return what the environment of a process must hold, from its start, to be simulated.

    The arguments are those of `start`, and `without`: aclnn functions that the device shall lack,
    beside those it does lack. `calls` is a file to which calls are appended; `report` only counts.
    """
    if not 1 <= devices <= MOST_DEVICES:
        raise ValueError(f"devices: expected 1 to {MOST_DEVICES}, got {devices}")
    check_version(cann)
    if task_queue not in (0, 1, 2):
        raise ValueError(f"task_queue: expected 0, 1 or 2; got {task_queue}")
    if streams not in STREAMS:
        raise ValueError(f"streams: expected one of {', '.join(STREAMS)}; got {streams}")
    product, soc = device_of(product)
    library = operators()
    path = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    libraries = [str(LIBRARIES), *(x for x in path if x and x != str(LIBRARIES))]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "ASCEND_HOME_PATH": str(CANN),
        "ASCEND_OPP_PATH": str(CANN / "opp"),
        "TASK_QUEUE_ENABLE": str(task_queue),
        AUTOLOAD: "1",
        "CANN_SIM_DEVICES": str(devices),
        "CANN_SIM_PRODUCT": product,
        "CANN_SIM_SOC": soc,
        "CANN_SIM_VERSION": cann,
        "CANN_SIM_WITHOUT": ",".join([*missing_functions(product, cann), *without]),
        # A process that has not imported ascend_attn_ops loads its operators from here.
        "CANN_SIM_OPERATORS": str(library.__file__) if library else "",
        "CANN_SIM_CALLS": str(Path(calls).resolve()) if calls else "",
        "CANN_SIM_STREAMS": streams,
        "CANN_SIM_REPORT": "1" if report else "",
    }
