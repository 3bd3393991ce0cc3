{{ config(
    materialized='incremental',
    incremental_strategy='merge',
    unique_key='customer_id',
    meta={'lakehouse_patterns': {'merger': {
        'deletes': 'hard', 'is_deleted': 'is_deleted', 'sequence': 'revision'
    }}}
) }}

select * from {{ ref('customer_changes') }}
