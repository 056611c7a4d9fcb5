"""The options of the command line, which pytest's plugin reads from the environment."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from cann_simulator._environment import MOST_DEVICES, STREAMS
from cann_simulator._products import DEFAULT, check_version, device_of


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each argument of `start`."""
    parser.add_argument(
        "--devices", type=int, default=2, metavar="N",
        help=f"how many NPUs, 1 to {MOST_DEVICES} (default: 2)",
    )  # fmt: skip
    parser.add_argument(
        "--product", type=_checked(device_of), default=DEFAULT, metavar="NAME",
        help=f"A2, A3, 950, 310P, or the name of a SoC (default: {DEFAULT})",
    )  # fmt: skip
    parser.add_argument(
        "--cann", type=_checked(check_version), default="9.1", metavar="VERSION",
        help="the release of CANN: 8.5, 9.0 or 9.1 (the default)",
    )  # fmt: skip
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


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Return a type of argument that reports what `check` raises."""

    def name(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return name
