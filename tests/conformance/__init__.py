"""Runs a user's code with stock and with ours, and compares what the user sees.

A case is the user's code and nothing else: it builds, trains, saves, builds again, loads and trains on. It runs in
fresh processes, on real ranks, once with each tool of :mod:`~tests.conformance.tools`. What is compared: whether a save
or a load raises, and what; the calls of the user's own hooks, in their order; every tensor byte for byte and every
value with its type after the resume; the losses after it; the random numbers; what the save left behind.

To add a case, add one entry to a list: a class or a line to ``modules.py``, a line to ``optimizers.py``,
``moments.py`` or ``tensors.py``, a function to ``programs.py`` for what is more than one model. Hooks tell what they
see with ``note(...)``. ``python -m tests.conformance NAME`` runs the cases that have NAME in theirs and prints what
differs; ``CONFORMANCE_EXAMPLES=500`` draws more combinations of the lists than CI does.

The oracle is stock DCP; ``oracle="torch.save"`` or ``"right"`` (the training that was not interrupted) where DCP
cannot do what is asked. What differs on purpose is declared in the entry, by a constant of ``differences.py``, with its
reason in ``docs/differences.md``. A corpus is an entry in ``CORPORA`` of ``cases.py``. The corpus *ranks* has a rule of
its own, in ``ranks.py``; ``python -m tests.conformance ranks/ --table`` prints its verdicts.
"""

from __future__ import annotations

from tests import launch


def warm_up() -> None:
    """Have the server that ranks are forked from import the corpora, once, and what takes long in them."""
    for module in (
        "tests.conformance.cases",
        "torch._dynamo",
        "torchmetrics",
        "peft",
        "lightning.pytorch",
        "lightning.fabric",
        "accelerate",
        "transformers",
    ):
        launch.preload(module)
