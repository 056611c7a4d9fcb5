"""`python -m cann_simulator [options] script.py ...`: a program for NPUs without NPUs.

Instead of a script `-m module ...` runs a module, as `python` itself does.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from cann_simulator._options import add_options
from cann_simulator._start import start


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m cann_simulator",
        description="Runs a program for Ascend NPUs on a simulation of them.",
        usage="%(prog)s [options] (script.py | -m module) [arguments of the program]",
        allow_abbrev=False,
    )
    add_options(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    try:
        options = vars(parser.parse_args(arguments))
        module, script = options.pop("module"), options.pop("program")
        if not module and not script:
            parser.error("expected a script, or -m and a module")
        start(**options)
    except (ImportError, RuntimeError) as error:
        sys.exit(f"cann_simulator: {error}")
    if module:
        sys.argv = module
        runpy.run_module(module[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = script
        # In the place of the current folder, where `python -m` looks.
        sys.path[0] = os.path.dirname(os.path.abspath(script[0]))
        runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main()
