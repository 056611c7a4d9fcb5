"""The fixtures of tests/npu, and the options that choose tests: tests/npu/run.py runs both."""

from support.simulated_npu import *  # noqa: F403
from support.turns import (  # noqa: F401
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_report_header,
)
