{#- SCD Type 2: the MERGE statement. -#}

{% macro _scd2_merge(history, batch, target) %}
    {#- One MERGE of the rows that differ: a rerun has none and rewrites no file. -#}
    {%- set columns = lakehouse_patterns.quoted_names(
        (history.key | list) + (history.tracked | list) + (history.untracked | list)
        + lakehouse_patterns._scd2_own_columns()
    ) -%}
    {%- set matches, assignments = [], [] -%}
    {%- for name in lakehouse_patterns.quoted_names(history.key) -%}
        {%- do matches.append('stored.' ~ name ~ ' = rebuilt.' ~ name) -%}
    {%- endfor -%}
    {%- for name in columns -%}
        {%- do assignments.append(name ~ ' = rebuilt.' ~ name) -%}
    {%- endfor -%}
merge into {{ target }} as stored
using (
    {{ lakehouse_patterns._scd2_rebuilt_rows(history, batch, target) | indent(4) }}
) as rebuilt
    on
        {{ matches | join('\n        and ') }}
        and coalesce(stored.effective_from, stored.effective_to) = rebuilt.lakehouse_patterns_starts_at
when matched and not rebuilt.lakehouse_patterns_starts_row then delete
when matched then update set
    {{ assignments | join(',\n    ') }}
when not matched then insert (
    {{ columns | join(',\n    ') }}
) values (
    rebuilt.{{ columns | join(',\n    rebuilt.') }}
)
{%- endmacro %}
