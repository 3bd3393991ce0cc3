{{ config(
    materialized='incremental',
    incremental_strategy='append',
    partition_by=['landing_date'],
    post_hook='{{ lakehouse_patterns.incremental_watermark() }}',
) }}

-- Appended with each load and never rewritten: a line stays here with its reason although a later load of its file
-- corrected it. What counts today is in observability_visits_accounting.
select
    payload,
    rejected_as as status,
    rejected_by as reason,
    file_path,
    load_id,
    ingested_at,
    date as landing_date
from {{ ref('silver_visits_flagged') }}
where
    rejected_by is not null
    and {{ lakehouse_patterns.incremental_window('ingested_at', source=ref('silver_visits_flagged')) }}
