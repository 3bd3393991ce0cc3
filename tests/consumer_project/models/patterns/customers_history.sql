{{ config(
    materialized='scd2',
    unique_key='customer_id',
    meta={'lakehouse_patterns': {'scd2': {
        'changed_at': 'changed_at', 'sequence': 'revision', 'is_deleted': 'is_deleted'
    }}}
) }}

select * from {{ ref('customer_changes') }}
