"""Who holds which block of the KV cache; the tensors live in the runner."""
