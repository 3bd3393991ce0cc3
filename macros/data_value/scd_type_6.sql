{#-
    SCD Type 6 (1 + 2 + 3): beside what held at the time of each version, what holds today and what held before.

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
            name not in key + [effective_from, effective_to],
            "scd_type_6 has columns of attributes; '" ~ name ~ "' is part of the key or of the validity"
        ) -%}
    {%- endfor -%}
select
    * except ({{ columns | join(', ') }})
    {%- for name in columns %},
    {#- Rows without an ordering don't take part: of the versions only the open one. #}
    max_by({{ name }}, if({{ effective_to }} is null, {{ effective_from }}, null)) over by_key as {{ name }}_current,
    {{ name }} as {{ name }}_historical,
    lag({{ name }}) over by_start as {{ name }}_previous
    {%- endfor %}
from {{ versions }}
window
    by_key as (partition by {{ key | join(', ') }}),
    {#- Only the first version of a key may have no start. #}
    by_start as (partition by {{ key | join(', ') }} order by {{ effective_from }} asc nulls first)
{%- endmacro %}
