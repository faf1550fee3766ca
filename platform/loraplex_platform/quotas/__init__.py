"""Limits: how fast and how much each scope may use, and what it has used."""
