{{ config(materialized='view') }}

{{ lakehouse_patterns.filter_interceptor_valid_rows(ref('silver_visits_flagged')) }}
