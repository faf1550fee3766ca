"""Who belongs to a tenant, as what, and how they come in."""
