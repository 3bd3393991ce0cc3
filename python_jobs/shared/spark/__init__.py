"""Spark for jobs: session, command line contract, user queries, Hadoop files and macros rendered to SQL."""
