"""``transformers.Trainer``: ``class MyTrainer(DCPTrainerMixin, Trainer)``.

Enters: a Trainer and the moments of its training. Leaves: ``checkpoint-N`` directories, and the training continued
from one. The rule: the Trainer decides when to save and what is best; this package decides how.
Import it from :mod:`dcp_plugin.accelerate`.
"""

from dcp_plugin.transformers.mixin import DCPTrainerMixin

__all__ = ["DCPTrainerMixin"]
