{{ config(
    materialized='incremental',
    incremental_strategy='merge',
    unique_key=['event_date', 'referral'],
    partition_by=['event_date'],
    meta={'lakehouse_patterns': {'merger': {
        'deletes': 'hard', 'is_deleted': 'is_deleted', 'sequence': ['last_ingested_at'],
        'prune_by': ['event_date'], 'on_null_key': 'fail'
    }}}
) }}

-- A day that any load touched is recomputed from silver, whole: distinct counts can't be added up.
with touched_days as (
    {{ lakehouse_patterns.incremental_groups(
        ref('silver_visits_touched_hours'), by='event_date', column='last_ingested_at'
    ) }}
),

events as (
    select
        event_date,
        coalesce(context.referral, 'direct') as referral,
        visit_id,
        user_id,
        1 as events
    from {{ ref('silver_visits') }}
    {% if is_incremental() %}
        union all
        -- What is published counts nothing: a referral that silver no longer has is deleted.
        select
            event_date,
            referral,
            null as visit_id,
            null as user_id,
            0 as events
        from {{ this }}
    {% endif %}
)

select
    events.event_date,
    events.referral,
    sum(events.events) as events,
    count(distinct events.visit_id) as visits,
    count(distinct events.user_id) as users,
    touched_days.last_ingested_at,
    sum(events.events) = 0 as is_deleted
from events
inner join touched_days on events.event_date = touched_days.event_date
group by events.event_date, events.referral, touched_days.last_ingested_at
