"""Trying a tenant's models from the console, through the gateway, like any client of theirs."""
