"""Tells what is installed here and what works, what a device accepts, and what a mask keeps."""

from __future__ import annotations

import argparse
import signal
import sys

from ascend_attn_ops._core import sparse_modes
from ascend_attn_ops._core.device_limits import Device, device_in_force, parse
from ascend_attn_ops._core.operators import ALL_TOKENS
from ascend_attn_ops.debug import report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ascend_attn_ops", description=__doc__)
    commands = parser.add_subparsers(metavar="{report,limits,mask}")
    language = report.language_of_locale()
    parser.set_defaults(run=lambda options: report.print_report(options.lang), lang=language)
    text = "report what is installed, what works here, and why not (default)"
    reporting = commands.add_parser("report", help=text, description=text)
    reporting.add_argument(
        "--lang", choices=("en", "zh"), default=language,
        help="zh: headings in Chinese as well; default: the locale's",
    )  # fmt: skip
    _add_limits(commands)
    _add_mask(commands)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


def _add_limits(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "print the sizes, dtypes and rules that a device accepts"
    parser = commands.add_parser("limits", help=text, description=text)
    parser.add_argument(
        "device", type=_device, nargs="?", default=device_in_force() or parse("A2"),
        metavar="PRODUCT:CANN", help="A3 or A3:9.0; default: the device that calls are checked for",
    )  # fmt: skip
    parser.set_defaults(run=lambda options: report.print_limits(options.device))


def _add_mask(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "draw the keys (columns) that each query (row) keeps in a sparse_mode"
    modes = "; ".join(f"{mode} {meaning}" for mode, meaning in sparse_modes.MODES.items())
    parser = commands.add_parser("mask", help=text, description=text, epilog=modes)
    parser.add_argument(
        "--mode", type=int, required=True, choices=sparse_modes.MODES, metavar="0..8"
    )
    parser.add_argument("--sq", type=_lengths, required=True, help="queries; in modes 7 and 8 of "
                        "every sequence, as 4,6")  # fmt: skip
    parser.add_argument("--skv", type=_lengths, required=True, help="keys, as --sq")
    parser.add_argument("--pre", type=int, default=ALL_TOKENS, help="pre_tokens")
    parser.add_argument("--next", type=int, default=ALL_TOKENS, help="next_tokens")
    parser.add_argument("--prefix", type=int, default=0, help="for modes 5 and 6")
    parser.set_defaults(run=lambda options: _draw(parser, options))


def _device(text: str) -> Device:
    try:
        device = parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if device is None:
        raise argparse.ArgumentTypeError("expected a product, as A3 or A3:9.0")
    return device


def _lengths(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _draw(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if len(options.sq) != len(options.skv):
        parser.error(f"--sq has {len(options.sq)} sequences, --skv has {len(options.skv)}")
    sequences = list(zip(options.sq, options.skv, strict=True))
    filled = [i for i, sizes in enumerate(sequences) if all(sizes)]
    band = (filled or [0])[0 if options.mode == 8 else -1]
    drawn = [
        sparse_modes.sparse_mode_mask(
            options.mode, sq, skv, pre_tokens=options.pre, next_tokens=options.next,
            prefix=options.prefix, band=index == band,
        )
        for index, (sq, skv) in enumerate(sequences)
    ]  # fmt: skip
    print(f"sparse_mode {options.mode}, {sparse_modes.MODES[options.mode]}")
    print("query down, key across; ■ kept")
    for mask in drawn:
        print("\n" + sparse_modes.draw(mask))
    return 0


if __name__ == "__main__":
    # `... | head` closes the pipe early, which ends this process as it ends other programs.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
