"""Data quality: audits, constraints, schema rules, observation."""
