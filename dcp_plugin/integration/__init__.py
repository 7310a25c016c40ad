"""Layer 8: what the packages for Lightning, Fabric, Accelerate and transformers share."""
