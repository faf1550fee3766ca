"""Scheduling without a model: traces, a cost model, and what replays the one at the cost of the other."""
