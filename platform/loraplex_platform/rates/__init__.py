"""How fast each scope may go: rates and concurrency in Redis, and what holds while it is away."""
