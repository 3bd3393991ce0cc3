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

-- An hour that any load touched is counted again from silver as a whole: views that a correction took away disappear.
with touched_hours as (
    {{ lakehouse_patterns.incremental_groups(
        ref('silver_visits_touched_hours'), by=['event_date', 'event_hour'], column='last_ingested_at'
    ) }}
),

views as (
    select
        event_date,
        date_trunc('hour', event_time) as event_hour,
        page,
        1 as views
    from {{ ref('silver_visits') }}
    {% if is_incremental() %}
        union all
        -- What is published counts nothing: a page that silver no longer has comes out with no view, and is deleted.
        select
            event_date,
            event_hour,
            page,
            0 as views
        from {{ this }}
    {% endif %}
)

select
    views.event_date,
    views.event_hour,
    views.page,
    sum(views.views) as views,
    touched_hours.last_ingested_at,
    sum(views.views) = 0 as is_deleted
from views
inner join touched_hours
    on views.event_date = touched_hours.event_date
    and views.event_hour = touched_hours.event_hour
group by views.event_date, views.event_hour, views.page, touched_hours.last_ingested_at
