{{ config(materialized='incremental', incremental_strategy='append') }}

with lines as (
    select *
    from {{ ref('silver_visits_flagged') }}
    where {{ lakehouse_patterns.incremental_window('ingested_at') }}
),

statistics as (
    {{ lakehouse_patterns.filter_interceptor_statistics('lines', var('visit_conditions')) }}
)

select
    *,
    (select max(ingested_at) from {{ landed('parsed', 'silver_visits_parsed') }}) as ingested_at
from statistics
where input_rows > 0
