"""The services that tests and people start."""
