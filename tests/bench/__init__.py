"""What the bench computes itself."""
