{{ config(
    materialized='incremental',
    incremental_strategy='merge',
    unique_key='id',
    meta={'lakehouse_patterns': {'merger': {
        'deletes': 'soft', 'is_deleted': 'is_deleted', 'sequence': ['sequence'], 'on_null_key': 'fail'
    }}}
) }}

select
    id,
    login,
    email,
    registered_at,
    first_connection_at,
    last_connection_at,
    plan,
    changed_at,
    sequence,
    is_deleted,
    ingested_at
from {{ ref('silver_user_changes') }}
where {{ lakehouse_patterns.incremental_window('ingested_at') }}
