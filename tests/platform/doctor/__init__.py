"""What `loraplex doctor` finds on set-ups that are broken for real."""
