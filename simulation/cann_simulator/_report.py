"""Reports what ran in the simulation, where, how often, and what was refused."""

from __future__ import annotations

import ctypes
import json
import os
import sys

_HEADINGS = {
    "aclnn": "functions of aclnn, on the simulated NPU",
    "cpu": "operators of torch, on the CPU in the memory of the NPU",
}


def counts() -> dict[str, dict[str, int]]:
    """Return how often what ran: "aclnn" and "cpu" by name, "refused" by the rule.

    Only what ran while CANN_SIM_REPORT was set when the process started, as `--report` does.
    """
    library = ctypes.CDLL("libascendcl.so")
    library.cann_sim_counts.restype = ctypes.c_char_p
    found: dict[str, dict[str, int]] = json.loads(library.cann_sim_counts())
    return found


def text() -> str:
    """Return the report of `--report`."""
    product, soc, cann = (os.environ[f"CANN_SIM_{name}"] for name in ("PRODUCT", "SOC", "VERSION"))
    device = f"{f'Ascend {product}' if product else soc} with CANN {cann}"
    headings = {**_HEADINGS, "refused": f"refused, by the rules of {device}"}
    lines = [f"cann_simulator: what ran on the simulated {soc} ({device})"]
    found = counts()
    for key, heading in headings.items():
        rows = sorted(found[key].items(), key=lambda row: (-row[1], row[0]))
        lines.append(f"  {heading}: {sum(times for _, times in rows)}")
        lines += [f"    {times:>9}  {name}" for name, times in rows]
    return "\n".join(lines)


def write() -> None:
    print(text(), file=sys.stderr, flush=True)
