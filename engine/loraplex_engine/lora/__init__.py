"""LoRA adapters: parse and check them, pool them, add their deltas."""
