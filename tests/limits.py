"""The one time limit of the tests. It only ends what hangs: no verdict depends on it.

It is more than twenty times what the longest test takes on two quiet cores. ``TEST_TIMEOUT_SCALE=3`` triples it.
"""

from __future__ import annotations

import os

HANG = 1200.0 * float(os.environ.get("TEST_TIMEOUT_SCALE", "1"))
"""Seconds after which a rank, a program, a thread or a whole test counts as hanging."""
