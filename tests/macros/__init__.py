"""The package's macros as a whole: what all of them, or all materializations, have in common."""
