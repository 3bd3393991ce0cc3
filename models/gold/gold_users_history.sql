{{ config(
    materialized='scd2',
    unique_key='id',
    meta={'lakehouse_patterns': {'scd2': {
        'changed_at': 'changed_at', 'sequence': 'sequence', 'is_deleted': 'is_deleted',
        'tracked_columns': [
            'login', 'email', 'registered_at', 'first_connection_at', 'last_connection_at', 'plan'
        ]
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
