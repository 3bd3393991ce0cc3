{#- Reading versions as of an instant, from `materialized='scd2'`, a snapshot or any table with such intervals. -#}

{% macro as_of(timestamp, versions=none, effective_from='effective_from', effective_to='effective_to') %}
    {{ return(adapter.dispatch('as_of', 'lakehouse_patterns')(timestamp, versions, effective_from, effective_to)) }}
{% endmacro %}

{% macro default__as_of(timestamp, versions=none, effective_from='effective_from', effective_to='effective_to') %}
    {#- Validity is half-open: at the instant of a change the new version holds. -#}
    {%- set prefix = versions ~ '.' if versions else '' -%}
(
    {{ prefix }}{{ effective_from }} <= {{ timestamp }}
    and ({{ prefix }}{{ effective_to }} > {{ timestamp }} or {{ prefix }}{{ effective_to }} is null)
)
{%- endmacro %}
