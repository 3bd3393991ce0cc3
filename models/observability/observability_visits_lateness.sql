{{ config(
    materialized='incremental',
    incremental_strategy='merge',
    unique_key=['event_date', 'bucket'],
    partition_by=['event_date'],
    meta={'lakehouse_patterns': {'merger': {
        'sequence': ['last_ingested_at'], 'prune_by': ['event_date'], 'on_null_key': 'fail'
    }}}
) }}

-- How many folders after its own hour each valid line landed; all buckets of a touched date are rewritten, zeros
-- included.
with touched_dates as (
    {{ lakehouse_patterns.incremental_groups(
        ref('silver_visits_touched_hours'), by='event_date', column='last_ingested_at'
    ) }}
),

-- A date that lost its last valid line keeps one line without times, of no bucket but `unknown`.
lines as (
    select
        touched_dates.event_date,
        touched_dates.last_ingested_at,
        date_trunc('hour', valid.event_time) as event_hour,
        timestamp_seconds(unix_date(valid.date) * 86400L + valid.hour * 3600) as landing_hour
    from touched_dates
    left join {{ ref('silver_visits_valid') }} as valid on touched_dates.event_date = valid.event_date
),

report as (
    {{ lakehouse_patterns.lateness_report(
        'lines', event_time='event_hour', arrived_at='landing_hour',
        buckets=['0 hours', '1 hour', '3 hours', '12 hours'], by=['event_date', 'last_ingested_at']
    ) }}
)

select
    event_date,
    bucket,
    delay_up_to,
    row_count as lines,
    last_ingested_at
from report
where delay_up_to <> 'unknown'
