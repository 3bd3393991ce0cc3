{{ config(
    materialized='awap',
    partition_by=['event_date'],
    meta={'lakehouse_patterns': {'awap': {
        'period': 'event_date',
        'audits': [
            {'name': 'one_row_a_day', 'type': 'row_count', 'min': 1, 'max': 1},
            {'name': 'numbers_agree', 'type': 'record',
             'valid_when': 'users > 0 and visits >= users and events >= visits'},
            {'name': 'hourly_users_dropped', 'type': 'change',
             'expression': 'sum(users_per_hour)', 'min': -0.5},
            {'name': 'hourly_users_soared', 'type': 'change', 'outcome': 'annotate',
             'expression': 'sum(users_per_hour)', 'max': 3.0}
        ]
    }}}
) }}

-- A day that any load touched is computed anew, audited, and published whole. The audits compare users per hour, not
-- per day: a day that is still filling up is no drop.
with touched_days as (
    {{ lakehouse_patterns.incremental_groups(
        ref('silver_visits_touched_hours'), by='event_date', column='last_ingested_at'
    ) }}
),

visits as (
    select
        visits.event_date,
        visits.event_time,
        visits.visit_id,
        visits.user_id,
        touched_days.last_ingested_at
    from {{ ref('silver_visits') }} as visits
    inner join touched_days on visits.event_date = touched_days.event_date
),

hours as (
    select
        event_date,
        count(distinct user_id) as users
    from visits
    group by event_date, date_trunc('hour', event_time)
),

hourly as (
    select
        event_date,
        avg(users) as users_per_hour
    from hours
    group by event_date
),

daily as (
    select
        event_date,
        count(*) as events,
        count(distinct visit_id) as visits,
        count(distinct user_id) as users,
        max(last_ingested_at) as last_ingested_at
    from visits
    group by event_date
)

select
    daily.event_date,
    daily.events,
    daily.visits,
    daily.users,
    hourly.users_per_hour,
    daily.last_ingested_at
from daily
inner join hourly on daily.event_date = hourly.event_date
