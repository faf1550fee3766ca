"""Requests reserved before work and settled after it, exactly once, and the checks that prove it."""
