"""Messages of the log on a rank, where pytest's ``caplog`` is not."""

from __future__ import annotations

import logging


def logged(name: str = "dcp_plugin") -> list[str]:
    """A list that gets each message that a logger of this process logs from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    return messages
