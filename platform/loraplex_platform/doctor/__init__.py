"""`loraplex doctor`: what is wrong with this machine or configuration, and the command that mends it."""
