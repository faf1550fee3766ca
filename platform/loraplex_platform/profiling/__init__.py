"""What a gateway costs, for `loraplex bench profile`. Nothing here runs unless that command does."""
