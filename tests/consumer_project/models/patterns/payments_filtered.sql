{{ config(materialized='table') }}

with payments as (
    {{ lakehouse_patterns.dead_letter_valid_rows(ref('payments_flagged')) }}
)

{{ lakehouse_patterns.filter_interceptor_flags('payments', var('payment_conditions')) }}
