"""Where a step's time goes: `loraplex bench profile`. Nothing here runs unless that command does."""
