"""Native CPU kernels in plain C, compiled at first use; each has a torch fallback."""
