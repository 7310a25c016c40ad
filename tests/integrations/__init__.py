"""One checkpoint, every integration: six integrations, each of which saves what all of them load."""

INTEGRATIONS = ("lightning", "accelerate", "fabric", "transformers", "plain", "stock")
