"""Who did what, and the replies kept for repeated POSTs."""
