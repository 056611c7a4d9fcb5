"""`python -m ascend_attn_ops`: what is installed and what works; with `--limits A3:9.0`: what that
device accepts; `python -m ascend_attn_ops mask`: which keys a sparse_mode keeps."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ascend_attn_ops import masks, report
from ascend_attn_ops._operators import ALL_TOKENS
from ascend_attn_ops.device_limits import Device, device_in_force, parse


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ascend_attn_ops", description=__doc__)
    parser.add_argument(
        "--limits", type=_device, nargs="?", const=device_in_force() or parse("A2"),
        metavar="PRODUCT:CANN", help="what a device accepts, as A3 or A3:9.0; without a name, the "
        "device that calls are checked for",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("report", help="what is installed, what works here, and why not (default)")
    _add_mask(commands.add_parser("mask", help="draw the keys that a sparse_mode keeps"))
    options = parser.parse_args(arguments)
    if options.command == "mask":
        return _draw(parser, options)
    return report.print_limits(options.limits) if options.limits else report.print_report()


def _add_mask(parser: argparse.ArgumentParser) -> None:
    modes = "; ".join(f"{mode} {meaning}" for mode, meaning in masks.MODES.items())
    parser.description = "Draws which keys (columns) each query (row) keeps."
    parser.epilog = modes
    parser.add_argument("--mode", type=int, required=True, choices=masks.MODES, metavar="0..8")
    parser.add_argument("--sq", type=_lengths, required=True, help="queries; in the modes 7 and 8 "
                        "of every sequence, as 4,6")  # fmt: skip
    parser.add_argument("--skv", type=_lengths, required=True, help="keys, as --sq")
    parser.add_argument("--pre", type=int, default=ALL_TOKENS, help="pre_tokens")
    parser.add_argument("--next", type=int, default=ALL_TOKENS, help="next_tokens")
    parser.add_argument("--prefix", type=int, default=0, help="for the modes 5 and 6")
    parser.add_argument("--out", type=Path, help="write a PNG instead of text")


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
    filled = [i for i, pair in enumerate(zip(options.sq, options.skv, strict=True)) if all(pair)]
    band = (filled or [0])[0 if options.mode == 8 else -1]
    drawn = [
        masks.sparse_mode_mask(
            options.mode,
            sq,
            skv,
            pre_tokens=options.pre,
            next_tokens=options.next,
            prefix=options.prefix,
            band=index == band,
        )
        for index, (sq, skv) in enumerate(zip(options.sq, options.skv, strict=True))
    ]
    if options.out:
        masks.write_png(drawn, options.out)
        print(options.out)
        return 0
    print(f"sparse_mode {options.mode}, {masks.MODES[options.mode]}")
    print("query down, key across; ■ kept")
    for mask in drawn:
        print("\n" + masks.draw(mask))
    return 0


if __name__ == "__main__":
    sys.exit(main())
