"""The server that ranks are forked from imports the corpora: once, not once per launch."""

from __future__ import annotations

from tests.conformance import warm_up

warm_up()
