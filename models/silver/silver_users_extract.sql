{{ config(materialized='view') }}

-- The newest full extract, one row a user; an extract without `updated_at` takes its folder's date, and a later load of
-- that folder a microsecond more, so that a correction of the same day is newer.
with current_lines as (
    {{ lakehouse_patterns.current_lines(
        ref('silver_users_extract_flagged'), landed('bronze', 'bronze_users_files')
    ) }}
),

fields as (
    select
        json_object as extract,
        error_class,
        load_id,
        -- The folder's date, or that of a file which lies in no dated folder.
        coalesce(
            try_to_timestamp(concat(nullif(regexp_extract(file_path, 'date=([0-9-]+)', 1), ''), 'T00:00:00Z')),
            timestamp_micros(unix_micros(file_modified_at) - pmod(unix_micros(file_modified_at), 86400000000))
        ) as extracted_at
    from current_lines
),

newest_extract as (
    select *
    from fields
    where
        error_class is null
        and extracted_at = (select max(all_lines.extracted_at) from fields as all_lines)
),

unique_users as (
    {{ lakehouse_patterns.windowed_deduplicator(
        'newest_extract',
        key='extract.id',
        order_by=['load_id', 'extract.updated_at'],
        keep='last',
        content='to_json(extract)'
    ) }}
)

select
    extract.id,
    extract.login,
    extract.email,
    {{ lakehouse_patterns._full_timestamp('extract.registered_datetime') }} as registered_at,
    {{ lakehouse_patterns._full_timestamp('extract.first_connection_datetime') }} as first_connection_at,
    {{ lakehouse_patterns._full_timestamp('extract.last_connection_datetime') }} as last_connection_at,
    extract.plan,
    coalesce(
        {{ lakehouse_patterns._full_timestamp('extract.updated_at') }},
        timestamp_micros(
            unix_micros(extracted_at) + load_id % if(load_id < 1000000000000000, 1000, 1000000) - 1
        )
    ) as updated_at
from unique_users
