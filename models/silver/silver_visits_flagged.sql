{{ config(materialized='view') }}

-- Lines of a file that landed again count once: its highest load is the file.
with current_lines as (
    {{ lakehouse_patterns.current_lines(
        landed('parsed', 'silver_visits_parsed'), landed('bronze', 'bronze_visits_files')
    ) }}
)

{{ lakehouse_patterns.filter_interceptor_flags('current_lines', var('visit_conditions')) }}
