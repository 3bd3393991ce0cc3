{{ config(materialized='table') }}

{{ lakehouse_patterns.dead_letter_rows(ref('payments_flagged')) }}
