{{ config(
    materialized='incremental',
    incremental_strategy='append',
    post_hook='{{ lakehouse_patterns.incremental_watermark() }}',
    enabled=(env_var('LAKEHOUSE_SOURCE', 'files') == 'files')
) }}

with dead as (
    {{ lakehouse_patterns.dead_letter_rows(ref('silver_user_changes_flagged')) }}
)

select
    payload,
    error_class,
    error_message,
    ingested_at
from dead
where {{ lakehouse_patterns.incremental_window('ingested_at', source=ref('silver_user_changes_flagged')) }}
