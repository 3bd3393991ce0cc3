{{ config(
    materialized='incremental',
    incremental_strategy='merge',
    unique_key=['visit_id', 'event_time'],
    partition_by=['event_date'],
    on_schema_change='append_new_columns',
    meta={'lakehouse_patterns': {'merger': {
        'deletes': 'hard', 'is_deleted': 'is_deleted',
        'sequence': ['last_ingested_at', 'load_id', 'payload_hash'],
        'prune_by': ['event_date'], 'on_null_key': 'fail'
    }}}
) }}

-- Every key that a load touched is decided again among all its current lines: the highest (load_id, payload_hash)
-- wins (the merge's `sequence`), and a key that has no current line any more is deleted. So the outcome is the same
-- in whatever order hours are loaded, loaded again or corrected. `last_ingested_at` leads the sequence because a
-- later decision always beats an earlier one; within one decision it is equal.
-- depends_on: {{ ref('silver_visits_touched') }}
{% if is_incremental() %}
    with touched as (
        select
            visit_id,
            event_time,
            event_date,
            max(last_ingested_at) as last_ingested_at
        from {{ ref('silver_visits_touched') }}
        where {{ lakehouse_patterns.incremental_window('last_ingested_at') }}
            and visit_id is not null
            and event_time is not null
        group by visit_id, event_time, event_date
    ),

    lines as (
        select
            touched.visit_id,
            touched.event_time,
            touched.event_date,
            touched.last_ingested_at,
            valid.user_id,
            valid.keep_private,
            valid.page,
            valid.context,
            coalesce(valid.load_id, 0) as load_id,
            coalesce(valid.payload_hash, '') as payload_hash,
            valid.visit_id is null as is_deleted
        from touched
        left join {{ ref('silver_visits_valid') }} as valid
            on touched.event_date = valid.event_date
            and touched.visit_id = valid.visit_id
            and touched.event_time = valid.event_time
    ),
{% else %}
    with lines as (
        select
            visit_id,
            event_time,
            event_date,
            ingested_at as last_ingested_at,
            user_id,
            keep_private,
            page,
            context,
            load_id,
            payload_hash,
            false as is_deleted
        from {{ ref('silver_visits_valid') }}
    ),
{% endif %}

wrapped as (
    {{ lakehouse_patterns.wrapper(
        relation='lines',
        layout='computed_struct',
        computed={
            'is_connected': 'context.user.connected_since is not null',
            'page_referral_key': "concat_ws('-', page, context.referral)"
        }
    ) }}
)

select * from wrapped
