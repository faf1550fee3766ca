"""Draws the next token of each row from its logits; noise is stateless and per row."""
