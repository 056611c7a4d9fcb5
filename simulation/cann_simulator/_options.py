"""The options of the command line, which pytest's plugin reads from the environment."""

from __future__ import annotations

import argparse
from typing import Any

from cann_simulator._environment import MOST_DEVICES, STREAMS
from cann_simulator._products import VERSIONS, soc_name


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each argument of `start`."""
    parser.add_argument(
        "--devices", type=int, default=2, metavar="N",
        help=f"how many NPUs, 1 to {MOST_DEVICES} (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--soc", type=_soc, default="Ascend910B2", metavar="NAME",
        help="Ascend910B2 (the default) or another; for A2, A3, 950 and 310P their usual one",
    )  # fmt: skip
    parser.add_argument(
        "--cann", choices=VERSIONS, default=VERSIONS[-1], help="the release of CANN (default: 9.1)"
    )
    parser.add_argument(
        "--task-queue", type=int, choices=(0, 1, 2), default=1,
        help="TASK_QUEUE_ENABLE of torch_npu (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--streams", choices=STREAMS, default="lenient",
        help="strict: an error where nothing orders work on two streams in the same memory",
    )  # fmt: skip
    parser.add_argument(
        "--calls", metavar="FILE", help="write every call of an aclnn function as a line of JSON"
    )
    parser.add_argument(
        "--report", action="store_true",
        help="say at the end which operators ran, where and how often, and what was refused",
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help="start even where there is a real CANN or an NPU"
    )


def parse(arguments: list[str], prog: str) -> dict[str, Any]:
    """Return the arguments of `start`."""
    parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
    add_options(parser)
    return vars(parser.parse_args(arguments))


def _soc(text: str) -> str:
    try:
        return soc_name(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
