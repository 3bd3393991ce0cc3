{{ config(
    materialized='incremental',
    incremental_strategy='append',
    post_hook='{{ lakehouse_patterns.incremental_watermark() }}',
    enabled=(env_var('LAKEHOUSE_SOURCE', 'files') == 'kafka')
) }}

select
    record.payload,
    record.partition,
    record.offset,
    error_class,
    error_message,
    ingested_at
from {{ ref('silver_users_records_flagged') }}
where
    error_class is not null
    and {{ lakehouse_patterns.incremental_window('ingested_at', source=ref('silver_users_records_flagged')) }}
