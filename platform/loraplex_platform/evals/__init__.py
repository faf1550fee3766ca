"""Evals: suites of golden prompts with checks, run against one immutable revision and compared."""
