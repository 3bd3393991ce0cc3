{{ config(materialized='table') }}

with payments as (
    select * from values
        (1, '10.50', date '2026-01-01'), (2, 'ten', date '2026-01-01'), (3, '7', date '2026-01-02'), (4, null, date '2026-01-02')
    as payments (payment_id, amount_text, day)
)

{{ lakehouse_patterns.dead_letter_flags('payments', [
    {'name': 'amount', 'expression': 'try_cast(amount_text as decimal(10, 2))', 'inputs': ['amount_text']}
]) }}
