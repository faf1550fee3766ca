"""What must be told to others once a transaction has committed, and the relay that tells it."""
