{{ config(materialized='view') }}

-- The users' history begins with their first change, so a visit before it has no plan. Either feed may be absent.
with visits as (
    select
        visit_id,
        event_time,
        event_date,
        user_id,
        page,
        context.technical.device_type,
        context.technical.device_version
    from {{ ref('silver_visits') }}
),

visits_with_plans as (
    {{ lakehouse_patterns.static_joiner(
        'visits',
        ref('gold_users_history'),
        keys={'user_id': 'id'},
        columns=['plan'],
        as_of='event_time',
        min_reference_rows=0
    ) }}
)

{{ lakehouse_patterns.static_joiner(
    'visits_with_plans',
    ref('silver_devices'),
    keys={'device_type': 'type', 'device_version': 'version'},
    columns={'device': 'full_name'},
    min_reference_rows=0
) }}
