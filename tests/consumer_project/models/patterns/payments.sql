{{ config(materialized='view') }}

{{ lakehouse_patterns.filter_interceptor_valid_rows(ref('payments_filtered')) }}
