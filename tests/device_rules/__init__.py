"""Compares CANN's own checks with this library's, on the same parameter sets.

CANN's tiling code, which runs on the host and checks the arguments of a launch, was compiled from
its sources and asked. `verdicts/<operator>.jsonl.xz` has one parameter set per line: its arguments,
and the devices that accept and refuse it. A device is a product and a branch of the sources.

    python -m device_rules [operator ...]    # in tests/: prints where the two disagree
"""
