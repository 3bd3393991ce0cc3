{{ config(
    materialized='awap',
    partition_by=['event_date'],
    meta={'lakehouse_patterns': {'awap': {
        'period': 'event_date', 'is_deleted': 'is_deleted',
        'audits': [
            {'name': 'each_level_counts_each_view_once', 'type': 'measure',
             'expression': 'sum(row_count) - 8 * sum(if(grouping_id = 7, row_count, 0))', 'min': 0, 'max': 0}
        ]
    }}}
) }}

-- A day that any load touched is computed again as a whole.
with touched_days as (
    {{ lakehouse_patterns.incremental_groups(
        ref('silver_visits_touched_hours'), by='event_date', column='last_ingested_at'
    ) }}
),

days as (
    {{ lakehouse_patterns.cube_daily(
        ref('silver_visits_in_context'),
        day='event_date',
        dimensions=['page', 'plan', 'device_type'],
        where='event_date in (select touched_days.event_date from touched_days)'
    ) }}
)

select
    touched_days.event_date,
    days.page,
    days.plan,
    days.device_type,
    days.grouping_id,
    days.row_count,
    touched_days.last_ingested_at,
    days.event_date is null as is_deleted
from touched_days
left join days on touched_days.event_date = days.event_date
