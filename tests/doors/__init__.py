"""One checkpoint, every door: six doors, each of which saves what all of them load."""

DOORS = ("lightning", "accelerate", "fabric", "transformers", "plain", "stock")
