"""Benchmarks: a load generator for any OpenAI-compatible URL, peers, and the table of `make bench`."""
