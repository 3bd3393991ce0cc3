{{ config(materialized='view') }}

-- Lines of a file that landed again count once: its highest load is the file.
with current_loads as (
    select
        file_path,
        max(load_id) as load_id
    from {{ source('bronze', 'bronze_visits_files') }}
    group by file_path
),

current_lines as (
    select parsed.*
    from {{ source('parsed', 'silver_visits_parsed') }} as parsed
    inner join current_loads
        on parsed.file_path = current_loads.file_path
        and parsed.load_id = current_loads.load_id
)

{{ lakehouse_patterns.filter_interceptor_flags('current_lines', var('visit_conditions')) }}
