"""What `loraplex plan` works out, against sums done by hand."""
