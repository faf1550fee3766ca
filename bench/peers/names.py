"""Names that results files use."""

OURS = "loraplex"
