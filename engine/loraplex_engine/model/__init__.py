"""The decoder: configuration, weights, linear layers and the Llama-family forward pass."""
