"""How models write tool calls: one class per format, chosen from the chat template (`choice.py`)."""
