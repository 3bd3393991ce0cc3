{#- The day that a run is for, which names versions, units and slices. -#}

{% macro logical_date() %}
    {{ return(adapter.dispatch('logical_date', 'lakehouse_patterns')()) }}
{% endmacro %}

{% macro default__logical_date() %}
    {#-
        The logical date of the run, never the clock's: a backfill names its day. If none is given, a command that only
        reads the SQL (compile, docs generate, a linter) gets a day, and a command that runs it is refused.
    -#}
    {%- set text = var('lakehouse_patterns_logical_date', none) or env_var('LOGICAL_DATE', '') -%}
    {%- if not execute -%}
        {{ return(text) }}
    {%- elif not text and flags.WHICH not in ['run', 'build', 'test', 'snapshot', 'run-operation', 'retry', 'show'] -%}
        {{ return('1970-01-01') }}
    {%- endif -%}
    {{ return(lakehouse_patterns.require_date(text)) }}
{% endmacro %}


{% macro require_date(text) %}
    {%- do lakehouse_patterns.require(
        modules.re.fullmatch('\\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\\d|3[01])', text | string),
        "the logical date must be a day such as 2024-01-01, as --vars '{lakehouse_patterns_logical_date: …}' or in "
        ~ "LOGICAL_DATE, got '" ~ text ~ "'"
    ) -%}
    {{ return(text | string) }}
{% endmacro %}
