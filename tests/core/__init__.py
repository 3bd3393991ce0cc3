"""`python_jobs/shared/core`, which needs no Spark: `make mutants` runs these tests against every small change."""
