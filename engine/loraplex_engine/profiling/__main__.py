"""`python -m loraplex_engine.profiling`."""

import sys

from loraplex_engine.profiling.command import main

sys.exit(main())
