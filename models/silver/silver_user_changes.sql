{{ config(materialized='view') }}

-- Read error-safe: an unparsable line or value is NULL here and `is_valid` says so.
with fields as (
    select
        from_json(
            payload,
            'op string, sequence string, changed_at string, id string, login string, email string, '
            || 'registered_datetime string, first_connection_datetime string, last_connection_datetime string, '
            || 'plan string, is_deleted string'
        ) as change,
        payload,
        ingested_at
    from {{ source('bronze', 'bronze_user_changes') }}
)

select
    change.id,
    change.op,
    try_cast(change.sequence as bigint) as sequence,
    try_to_timestamp(change.changed_at) as changed_at,
    change.login,
    change.email,
    try_to_timestamp(change.registered_datetime) as registered_at,
    try_to_timestamp(change.first_connection_datetime) as first_connection_at,
    try_to_timestamp(change.last_connection_datetime) as last_connection_at,
    change.plan,
    change.op = 'D' or coalesce(try_cast(change.is_deleted as boolean), false) as is_deleted,
    coalesce(
        change.id is not null
        and change.op in ('I', 'U', 'D')
        and try_cast(change.sequence as bigint) is not null
        and try_to_timestamp(change.changed_at) is not null,
        false
    ) as is_valid,
    payload,
    ingested_at
from fields
