"""Everything that is not Spark and runs beside it: the demo's runner and the local cluster."""
