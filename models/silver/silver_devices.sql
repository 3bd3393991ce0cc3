{{ config(
    materialized='incremental',
    incremental_strategy='merge',
    unique_key=['type', 'version'],
    meta={'lakehouse_patterns': {'merger': {
        'deletes': 'hard', 'is_deleted': 'is_deleted', 'sequence': ['load_id'], 'on_null_key': 'fail'
    }}}
) }}

with valid as (
    {{ lakehouse_patterns.dead_letter_valid_rows(ref('silver_devices_flagged')) }}
)

select
    type,
    version,
    json_object.full_name,
    coalesce(try_cast(json_object.is_deleted as boolean), false) as is_deleted,
    load_id,
    ingested_at
from valid
where {{ lakehouse_patterns.incremental_window('ingested_at') }}
