"""Attention over the paged KV cache: one interface, one backend per kind of device."""
