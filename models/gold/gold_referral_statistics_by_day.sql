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

-- A day that any load touched is computed anew from silver, whole: distinct counts can't be added up.
with touched_days as (
    select
        event_date,
        max(last_ingested_at) as last_ingested_at
    from {{ ref('silver_visits_touched') }}
    where
        event_date is not null
    {% if is_incremental() %}
        and {{ lakehouse_patterns.incremental_window('last_ingested_at') }}
    {% endif %}
    group by event_date
),

computed as (
    select
        visits.event_date,
        coalesce(visits.context.referral, 'direct') as referral,
        count(*) as events,
        count(distinct visits.visit_id) as visits,
        count(distinct visits.user_id) as users,
        touched_days.last_ingested_at,
        false as is_deleted
    from {{ ref('silver_visits') }} as visits
    inner join touched_days on visits.event_date = touched_days.event_date
    group by visits.event_date, coalesce(visits.context.referral, 'direct'), touched_days.last_ingested_at
)

select * from computed

{% if is_incremental() %}
    union all

    select
        published.event_date,
        published.referral,
        cast(0 as bigint) as events,
        cast(0 as bigint) as visits,
        cast(0 as bigint) as users,
        touched_days.last_ingested_at,
        true as is_deleted
    from {{ this }} as published
    inner join touched_days on published.event_date = touched_days.event_date
    left anti join computed
        on published.event_date = computed.event_date
        and published.referral = computed.referral
{% endif %}
