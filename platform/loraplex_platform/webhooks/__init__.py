"""Webhooks: addresses of tenants and of the operator that are told of alerts and invoices."""
