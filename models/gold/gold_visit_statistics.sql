{{ config(
    materialized='awap',
    partition_by=['event_date'],
    meta={'lakehouse_patterns': {'awap': {
        'period': 'event_date', 'is_deleted': 'is_deleted',
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

-- A day that any load touched is recomputed, audited, and published whole. The audits compare users per hour, not
-- per day: a day that is still filling up is no drop.
with touched_days as (
    {{ lakehouse_patterns.incremental_groups(
        ref('silver_visits_touched_hours'), by='event_date', column='last_ingested_at'
    ) }}
),

events as (
    select
        touched_days.event_date,
        touched_days.last_ingested_at,
        visits.visit_id,
        visits.user_id,
        date_trunc('hour', visits.event_time) as event_hour
    from touched_days
    left join {{ ref('silver_visits') }} as visits on touched_days.event_date = visits.event_date
)

select
    event_date,
    count(visit_id) as events,
    count(distinct visit_id) as visits,
    count(distinct user_id) as users,
    -- Users of each hour, summed over the hours and divided by their number.
    try_divide(count(distinct event_hour, user_id), count(distinct event_hour)) as users_per_hour,
    last_ingested_at,
    count(visit_id) = 0 as is_deleted
from events
group by event_date, last_ingested_at
