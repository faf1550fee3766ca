"""How large a fleet must be, what it costs, and when an API is cheaper: `loraplex plan`."""
