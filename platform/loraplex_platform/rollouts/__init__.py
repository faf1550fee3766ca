"""Rollouts: who meets the new revision, and when the numbers say that it is worse."""
