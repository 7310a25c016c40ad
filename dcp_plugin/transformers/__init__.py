"""``transformers.Trainer``: ``class MyTrainer(DCPTrainerMixin, Trainer)``.

Enters: a Trainer and the moments of its training. Leaves: ``checkpoint-N`` directories, and the training continued
from one. The rule: the Trainer decides when to save and which checkpoint is best; this package saves and loads.
:mod:`dcp_plugin.accelerate` has the name too.
"""

from dcp_plugin.transformers.mixin import DCPTrainerMixin

__all__ = ["DCPTrainerMixin"]
