"""PostgreSQL: snapshots by JDBC, plain clients, relations and CSV."""
