-- Fails with each day whose page views in gold are not the events that silver keeps.
with gold as (
    select
        event_date,
        sum(views) as events
    from {{ ref('gold_page_views_by_hour') }}
    group by event_date
),

silver as (
    select
        event_date,
        count(*) as events
    from {{ ref('silver_visits') }}
    group by event_date
)

select
    coalesce(gold.event_date, silver.event_date) as event_date,
    gold.events as gold_events,
    silver.events as silver_events
from gold
full outer join silver on gold.event_date = silver.event_date
where
    not gold.events <=> silver.events
