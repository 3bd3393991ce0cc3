{{ config(
    materialized='incremental',
    incremental_strategy='merge',
    unique_key=['type', 'version'],
    meta={'lakehouse_patterns': {'merger': {
        'deletes': 'hard', 'is_deleted': 'is_deleted', 'sequence': ['load_id'], 'on_null_key': 'fail'
    }}}
) }}

with fields as (
    select
        from_json(payload, 'type string, full_name string, version string, is_deleted string') as device,
        load_id,
        ingested_at
    from {{ landed('bronze', 'bronze_devices') }}
)

select
    device.type,
    device.version,
    device.full_name,
    coalesce(try_cast(device.is_deleted as boolean), false) as is_deleted,
    load_id,
    ingested_at
from fields
where
    device.type is not null
    and device.version is not null
    and {{ lakehouse_patterns.incremental_window('ingested_at') }}
