"""The Spark session of a job, its contract, user queries, Hadoop files and the macros that jobs share."""
