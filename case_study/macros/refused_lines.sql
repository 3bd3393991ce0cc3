{% macro refused_lines(flagged) %}
    {#- The lines of the newest loads that `dead_letter_flags` refuses, for a table to which each run appends. -#}
with dead as (
    {{ lakehouse_patterns.dead_letter_rows(flagged) }}
)

select
    payload,
    error_class,
    error_message,
    ingested_at
from dead
where {{ lakehouse_patterns.incremental_window('ingested_at', source=flagged) }}
{%- endmacro %}
