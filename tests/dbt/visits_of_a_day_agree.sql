-- Fails with each day on which the lines accounted as kept, the events in silver, the page views in gold and the cube's
-- total differ.
with counted as (
    select
        accounted_date as event_date,
        lines as kept_lines,
        0 as silver_events,
        0 as gold_views,
        0 as cube_views
    from {{ ref('observability_visits_accounting') }}
    where
        status = 'kept'

    union all

    select
        event_date,
        0 as kept_lines,
        1 as silver_events,
        0 as gold_views,
        0 as cube_views
    from {{ ref('silver_visits') }}

    union all

    select
        event_date,
        0 as kept_lines,
        0 as silver_events,
        views as gold_views,
        0 as cube_views
    from {{ ref('gold_page_views_by_hour') }}

    union all

    select
        event_date,
        0 as kept_lines,
        0 as silver_events,
        0 as gold_views,
        row_count as cube_views
    from {{ ref('gold_page_cube_by_day') }}
    where
        grouping_id = 7
)

select
    event_date,
    sum(kept_lines) as kept_lines,
    sum(silver_events) as silver_events,
    sum(gold_views) as gold_views,
    sum(cube_views) as cube_views
from counted
group by event_date
having
    sum(kept_lines) != sum(silver_events)
    or sum(silver_events) != sum(gold_views)
    or sum(silver_events) != sum(cube_views)
