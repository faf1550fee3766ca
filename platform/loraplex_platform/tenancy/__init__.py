"""Tenants, their API keys, and who a secret belongs to."""
