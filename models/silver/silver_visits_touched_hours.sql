{{ config(materialized='incremental', incremental_strategy='append') }}

-- A few rows for all the lines of a load: what is counted by hour or by day finds here what to count again.
select distinct
    event_date,
    date_trunc('hour', event_time) as event_hour,
    landing_date,
    last_ingested_at
from {{ ref('silver_visits_touched') }}
where {{ lakehouse_patterns.incremental_window('last_ingested_at') }}
