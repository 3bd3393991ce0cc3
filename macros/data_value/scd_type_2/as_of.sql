{#- Reading versions as of an instant, from `materialized='scd2'`, a snapshot or any table with such intervals. -#}

{% macro as_of(timestamp, versions=none, effective_from='effective_from', effective_to='effective_to') %}
    {{ return(adapter.dispatch('as_of', 'lakehouse_patterns')(timestamp, versions, effective_from, effective_to)) }}
{% endmacro %}

{% macro default__as_of(timestamp, versions=none, effective_from='effective_from', effective_to='effective_to') %}
    {#- Validity is half-open: at the instant of a change the new version holds. -#}
    {%- set begins = lakehouse_patterns.quoted_name(effective_from, versions) -%}
    {%- set ends = lakehouse_patterns.quoted_name(effective_to, versions) -%}
(
    {{ begins }} <= {{ timestamp }}
    and ({{ ends }} > {{ timestamp }} or {{ ends }} is null)
)
{%- endmacro %}
