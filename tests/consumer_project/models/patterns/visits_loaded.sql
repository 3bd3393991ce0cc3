{{ config(materialized='incremental', incremental_strategy='append') }}

with visits as (
    select * from values
        ('v1', 'home', timestamp '2026-01-01 10:00:00'), ('v2', 'about', timestamp '2026-01-01 11:00:00')
    as visits (visit_id, page, ingested_at)
)

select * from visits
where {{ lakehouse_patterns.incremental_window('ingested_at', bootstrap_from='2026-01-01T11') }}
