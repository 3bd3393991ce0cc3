{{ config(
    materialized='awap',
    partition_by=['week_start'],
    meta={'lakehouse_patterns': {'awap': {
        'period': 'week_start', 'is_deleted': 'is_deleted',
        'audits': [
            {'name': 'each_level_counts_each_view_once', 'type': 'measure',
             'expression': 'sum(row_count) - 8 * sum(if(grouping_id = 7, row_count, 0))', 'min': 0, 'max': 0}
        ]
    }}}
) }}

-- An ISO week with a touched day is rolled up again from the stored days.
with touched_days as (
    {{ lakehouse_patterns.incremental_groups(
        ref('silver_visits_touched_hours'), by='event_date', column='last_ingested_at'
    ) }}
),

touched_weeks as (
    select
        trunc(event_date, 'WEEK') as week_start,
        max(last_ingested_at) as last_ingested_at
    from touched_days
    group by trunc(event_date, 'WEEK')
),

weeks as (
    {{ lakehouse_patterns.cube_weekly(
        ref('gold_page_cube_by_day'),
        day='event_date',
        dimensions=['page', 'plan', 'device_type'],
        where='week_start in (select touched_weeks.week_start from touched_weeks)'
    ) }}
)

select
    touched_weeks.week_start,
    weeks.page,
    weeks.plan,
    weeks.device_type,
    weeks.grouping_id,
    weeks.row_count,
    touched_weeks.last_ingested_at,
    weeks.week_start is null as is_deleted
from touched_weeks
left join weeks on touched_weeks.week_start = weeks.week_start
