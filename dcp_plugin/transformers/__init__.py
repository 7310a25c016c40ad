"""The door of ``transformers.Trainer``: ``class MyTrainer(DCPTrainerMixin, Trainer)``.

``mixin`` translates the Trainer's moments, ``content`` says what is in a checkpoint, ``folder`` looks after the
``checkpoint-N`` directories.
"""

from dcp_plugin.transformers.mixin import DCPTrainerMixin

__all__ = ["DCPTrainerMixin"]
