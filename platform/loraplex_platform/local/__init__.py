"""Local mode: the whole product on one machine, started and supervised by `loraplex up`."""
