"""What the entries of all corpora have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ALL = ("plain", "ddp", "fsdp2")
WHOLE = ("plain", "ddp")
"""For what FSDP2 cannot take."""
UNWRAPPED = ("plain", "fsdp2")
"""For what DDP cannot take, because it puts a module around."""
EVERYWHERE = (*ALL, "fsdp2@3", "fsdp1")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of a corpus. Those of a corpus have a field ``variants`` besides: layouts of the model, or other ways
    in which the entry is a case each."""

    oracle: str = "stock"
    differs: Mapping[str, str] = field(default_factory=dict)
    must_work: bool = True
    """Ours has to restore what is right where stock fails. Where this is false, it may raise a CheckpointError, too."""

    def differs_in(self, variant: str) -> Mapping[str, str]:
        return self.differs

    def of_stock(self, variant: str) -> str:
        """Return the variant of which the oracle is asked."""
        return variant
