"""What can keep a benchmark from giving figures; messages are shown as they are.

BenchError
+-- BenchInputError   what was asked makes no sense, or names a file that is not there or not right
+-- NothingMeasuredError   the server gave nothing that could be measured
"""

from __future__ import annotations

__all__ = ["BenchError", "BenchInputError", "NothingMeasuredError"]


class BenchError(Exception):
    """A benchmark gave no figures."""


class BenchInputError(BenchError):
    """The options, or a file that they name, cannot be used."""


class NothingMeasuredError(BenchError):
    """No request finished, so there is nothing to report."""
