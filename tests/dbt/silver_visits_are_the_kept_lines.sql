-- Fails with each day on which another number of lines is accounted as kept than silver holds.
with accounted as (
    select
        accounted_date,
        sum(lines) as lines
    from {{ ref('observability_visits_accounting') }}
    where
        status = 'kept'
    group by accounted_date
),

silver as (
    select
        event_date,
        count(*) as lines
    from {{ ref('silver_visits') }}
    group by event_date
)

select
    coalesce(accounted.accounted_date, silver.event_date) as event_date,
    accounted.lines as accounted_lines,
    silver.lines as silver_lines
from accounted
full outer join silver on accounted.accounted_date = silver.event_date
where
    coalesce(accounted.lines, 0) != coalesce(silver.lines, 0)
