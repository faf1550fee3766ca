"""Deleting a tenant, for good."""
