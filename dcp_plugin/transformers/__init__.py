"""The integration for ``transformers.Trainer``: ``class MyTrainer(DCPTrainerMixin, Trainer)``.

Enters: a Trainer and the calls of its training loop. Leaves: ``checkpoint-N`` directories, and a training that
continues from such a directory. The rule: the Trainer decides when to save and which checkpoint is best; this package
saves and loads.
"""

from dcp_plugin.transformers.mixin import DCPTrainerMixin

__all__ = ["DCPTrainerMixin"]
