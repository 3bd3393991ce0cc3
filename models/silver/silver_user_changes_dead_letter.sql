{{ config(materialized='incremental', incremental_strategy='append') }}

select
    payload,
    case when id is null then 'NULL_KEY' else 'UNUSABLE_CHANGE' end as error_class,
    ingested_at
from {{ ref('silver_user_changes') }}
where not is_valid
    {% if is_incremental() %}
        and {{ lakehouse_patterns.incremental_window('ingested_at') }}
    {% endif %}
