"""Bugs of scripts with the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from tests.campaigns.with_trainer import Model, Ours, train


def data_skip_ignored(out: Path) -> None:
    """``ignore_data_skip`` resumes fast, with the first batches of the epoch once more.

    https://github.com/huggingface/transformers/pull/8878, https://github.com/NVIDIA/Model-Optimizer/pull/1611
    """
    train(out, ignore_data_skip=True)  # the bug


def schedule_stepped_in_load(out: Path) -> None:
    """A Trainer steps its scheduler after the load, once more for each step of the checkpoint.

    https://github.com/THUDM/slime/pull/1547
    """
    train(out, kind=_Stepping)


class _Stepping(Ours):
    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        for _ in range(self.state.global_step):
            self.lr_scheduler.step()  # the bug
        return prepared


def rate_of_the_arguments(out: Path) -> None:
    """A callback sets the configured learning rate when the training begins, also after it was lowered.

    https://github.com/bghira/SimpleTuner/pull/3027, https://github.com/IntelLabs/distiller/issues/145
    """
    train(out, callbacks=[_Lowered()], lr_scheduler_type="constant")


class _Lowered(transformers.TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["lr_scheduler"].base_lrs = [args.learning_rate] * 2  # the bug

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            kwargs["lr_scheduler"].base_lrs = [args.learning_rate / 10] * 2


def seed_of_the_callback(out: Path) -> None:
    """A callback gives a seed before the first step, so each start has the dropout of the first steps.

    https://github.com/huggingface/transformers/issues/17032
    """
    train(out, Model(dropout=0.5), callbacks=[_Seed()])


class _Seed(transformers.TrainerCallback):
    seeded = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.seeded:
            transformers.set_seed(1)  # the bug: also in a resume
            self.seeded = True
