"""What is kept for how long, and what goes when that is over."""
