{#-
    SCD Type 6 (1 + 2 + 3): each version has its own values, today's values and the values before it.

    Both are computed when the versions are read, from the versions alone. Stored, each change would have to rewrite all
    versions of its key, and a run that died between two of them would leave two answers to what holds today.
-#}

{% macro scd_type_6(versions, unique_key, columns, effective_from='effective_from', effective_to='effective_to') %}
    {{ return(adapter.dispatch('scd_type_6', 'lakehouse_patterns')(
        versions, unique_key, columns, effective_from, effective_to
    )) }}
{% endmacro %}

{% macro default__scd_type_6(versions, unique_key, columns, effective_from, effective_to) %}
    {%- set key = lakehouse_patterns.as_list(unique_key) -%}
    {%- set columns = lakehouse_patterns.as_list(columns) -%}
    {%- do lakehouse_patterns.require(
        key | length > 0, 'scd_type_6 needs unique_key: the column or columns that identify an entity'
    ) -%}
    {%- do lakehouse_patterns.require(
        columns | length > 0, 'scd_type_6 needs columns: those to give a current and a previous value'
    ) -%}
    {%- for name in columns -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns.column_name(key + [effective_from, effective_to], name) is none,
            "scd_type_6 has columns of attributes; '" ~ name ~ "' is part of the key or of the validity"
        ) -%}
    {%- endfor -%}
    {%- set added = [] -%}
    {%- for name in columns -%}
        {%- do added.extend([name ~ '_current', name ~ '_historical', name ~ '_previous']) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require_free_names(
        lakehouse_patterns.names_without_case(lakehouse_patterns.known_types(versions), columns), added, 'scd_type_6'
    ) -%}
    {%- set entity = lakehouse_patterns.quoted_names(key) | join(', ') -%}
    {%- set starts = lakehouse_patterns.quoted_name(effective_from) -%}
    {%- set ends = lakehouse_patterns.quoted_name(effective_to) -%}
select
    * except ({{ lakehouse_patterns.quoted_names(columns) | join(', ') }})
    {%- for name in columns %},
    {%- set value = lakehouse_patterns.quoted_name(name) %}
    {#- Rows without an ordering don't take part: of the versions only the open one. #}
    max_by({{ value }}, if({{ ends }} is null, {{ starts }}, null)) over by_key
        as {{ lakehouse_patterns.quoted_name(name ~ '_current') }},
    {{ value }} as {{ lakehouse_patterns.quoted_name(name ~ '_historical') }},
    lag({{ value }}) over by_start as {{ lakehouse_patterns.quoted_name(name ~ '_previous') }}
    {%- endfor %}
from {{ versions }}
window
    by_key as (partition by {{ entity }}),
    {#- Only the first version of a key may have no start. #}
    by_start as (partition by {{ entity }} order by {{ starts }} asc nulls first)
{%- endmacro %}
