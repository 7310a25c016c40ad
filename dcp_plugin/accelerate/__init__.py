"""The integration for Accelerate: ``attach(accelerator)``.

Enters: an accelerator with its prepared models, optimizers, schedulers and dataloaders. Leaves: named state for the
core, and objects filled from it. The rule: an unchanged script saves and loads on any number of processes.
"""

from __future__ import annotations

from dcp_plugin.accelerate.attachment import Attachment, attach

__all__ = ["Attachment", "attach"]
