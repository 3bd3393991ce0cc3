"""The test harness: session, dbt projects, macro rendering, row comparison, killer."""
