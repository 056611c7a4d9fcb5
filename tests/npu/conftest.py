"""The fixtures of the NPU tests, which run in a process that run.py has set up."""

from support.simulated_npu import *  # noqa: F403
