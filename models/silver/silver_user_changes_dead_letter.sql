{{ config(
    materialized='incremental',
    incremental_strategy='append',
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
{% if is_incremental() %}
    where {{ lakehouse_patterns.incremental_window('ingested_at') }}
{% endif %}
