{{ config(
    materialized='awap',
    meta={'lakehouse_patterns': {'awap': {'audits': [
        {'name': 'some rows', 'type': 'row_count', 'min': 1},
        {'name': 'amount is positive', 'type': 'record', 'valid_when': 'amount > 0', 'outcome': 'dispatch',
         'max_invalid_share': 0.5}
    ]}}}
) }}

select
    day,
    sum(amount) as amount
from {{ ref('payments') }}
group by day
