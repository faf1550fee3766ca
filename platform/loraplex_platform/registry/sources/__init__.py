"""Where adapters may be imported from: rules of what is allowed, and one reader per kind of place."""
