{{ config(materialized='view') }}

with versions as (
    {{ lakehouse_patterns.scd_type_6(ref('gold_users_history'), unique_key='id', columns=['plan']) }}
)

select
    {{ lakehouse_patterns.surrogate_key(['id', 'effective_from'], nullable='effective_from') }} as user_version_key,
    id,
    plan_historical,
    plan_previous,
    plan_current,
    effective_from,
    effective_to,
    is_current
from versions
