"""Checks that a device does what ascend_attn_ops expects of it: docs/hardware.md."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from ascend_attn_ops._core.arguments import bytes_in
from ascend_attn_ops.debug.report import language_of_locale

from ascend_attn_check import command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ascend_attn_check", description=__doc__)
    parser.add_argument("--device", help="cpu, or an NPU such as npu:0 (default, if there is one)")
    parser.add_argument("--quick", action="store_true", help="a part of the probes, in a minute")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="sections, groups "
                        "such as an operator; probes such as '*TND*', 'li-grad-*'")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    parser.add_argument("--resume", type=Path, metavar="FILE",
                        help="go on with a run that has left this report")  # fmt: skip
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A.json", "B.json"),
                        help="print what two reports say differently")  # fmt: skip
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE",
                        help="run calls that ascend_attn_ops.record wrote")  # fmt: skip
    parser.add_argument("--recorded", type=Path, metavar="FOLDER",
                        help="repeat the recorded calls of CANN's kernels")  # fmt: skip
    parser.add_argument("--memory", type=_bytes, default=2 * 10**9, metavar="SIZE",
                        help="the most memory to take on the device; default: 2GB")  # fmt: skip
    parser.add_argument("--dangerous", action="store_true",
                        help="also run probes that may stop the process or the device")  # fmt: skip
    parser.add_argument("--hang", type=float, default=60.0, metavar="SECONDS",
                        help="how long a probe may take; default: 60")  # fmt: skip
    parser.add_argument("--lang", choices=("en", "zh"), default=language_of_locale(),
                        help="zh: verdicts and headings in Chinese as well")  # fmt: skip
    parser.add_argument("--deviations", type=Path, metavar="FILE",
                        help="known deviations beside those of the package")  # fmt: skip
    return command.run(parser.parse_args(arguments))


def _bytes(text: str) -> int:
    size = bytes_in(text.upper())
    if size is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 2GB, got {text}")
    return size


if __name__ == "__main__":
    # `... | head` closes the pipe early, which ends this process as it ends other programs.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
