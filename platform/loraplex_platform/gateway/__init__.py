"""The data plane: OpenAI's chat, completions and models over the engine fleet."""
