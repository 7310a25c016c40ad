"""Messages of errors, of the log and of warnings, also on a rank, where pytest's ``caplog`` is not."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


def logged(name: str = "dcp_plugin") -> list[str]:
    """A list that gets each message that a logger of this process logs from now on."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    return messages


def refusal(kind: type[Exception], call: Callable[[], object], *words: str) -> str:
    """Return the message of the error of this class that a call has to raise, which has all these words."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert all(word in message for word in words), message
    return message


@contextmanager
def warned(about: str = "") -> Iterator[list[str]]:
    """A list that has, when the block has ended, the messages of its warnings that have these words."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught if about in str(warning.message)]
