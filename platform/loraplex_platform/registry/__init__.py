"""Base models, adapters and their immutable versions, deployments.

Kept empty: `registry.validate` runs in a small process of its own.
"""
