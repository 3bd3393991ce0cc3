"""JSON records and the dead letters among them."""
