"""`python -m bench` is `make bench`."""

from bench.run import main

main()
