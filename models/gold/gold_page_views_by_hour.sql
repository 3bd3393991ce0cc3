{{ config(
    materialized='incremental',
    incremental_strategy='merge',
    unique_key=['event_date', 'event_hour', 'page'],
    partition_by=['event_date'],
    meta={'lakehouse_patterns': {'merger': {
        'deletes': 'hard', 'is_deleted': 'is_deleted', 'sequence': ['last_ingested_at'],
        'prune_by': ['event_date'], 'on_null_key': 'fail'
    }}}
) }}

-- An hour that any load touched is counted anew from silver, whole: views that a correction took away disappear.
with touched_hours as (
    select
        event_date,
        date_trunc('hour', event_time) as event_hour,
        max(last_ingested_at) as last_ingested_at
    from {{ ref('silver_visits_touched') }}
    where
        event_time is not null
    {% if is_incremental() %}
        and {{ lakehouse_patterns.incremental_window('last_ingested_at') }}
    {% endif %}
    group by event_date, date_trunc('hour', event_time)
),

counted as (
    select
        visits.event_date,
        date_trunc('hour', visits.event_time) as event_hour,
        visits.page,
        count(*) as views,
        touched_hours.last_ingested_at,
        false as is_deleted
    from {{ ref('silver_visits') }} as visits
    inner join touched_hours
        on visits.event_date = touched_hours.event_date
        and date_trunc('hour', visits.event_time) = touched_hours.event_hour
    group by
        visits.event_date, date_trunc('hour', visits.event_time), visits.page, touched_hours.last_ingested_at
)

select * from counted

{% if is_incremental() %}
    union all

    select
        published.event_date,
        published.event_hour,
        published.page,
        cast(0 as bigint) as views,
        touched_hours.last_ingested_at,
        true as is_deleted
    from {{ this }} as published
    inner join touched_hours
        on published.event_date = touched_hours.event_date
        and published.event_hour = touched_hours.event_hour
    left anti join counted
        on published.event_date = counted.event_date
        and published.event_hour = counted.event_hour
        and published.page = counted.page
{% endif %}
