"""Backup and restore: the database and the adapter store, as one consistent state."""
