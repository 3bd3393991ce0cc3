{#- The day or the interval that a run is for, which names versions, units and slices. -#}

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
    {%- elif not text and lakehouse_patterns._only_reads_the_sql() -%}
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


{% macro logical_time() %}
    {{ return(adapter.dispatch('logical_time', 'lakehouse_patterns')()) }}
{% endmacro %}

{% macro default__logical_time() %}
    {#-
        The start of the run's interval, to the minute, of a run that comes more often than each day: as with
        logical_date, never the clock's. A command that only reads the SQL gets a time, too.
    -#}
    {%- set text = var('lakehouse_patterns_logical_time', none) or env_var('LOGICAL_TIME', '') -%}
    {%- if not text and (not execute or lakehouse_patterns._only_reads_the_sql()) -%}
        {{ return('1970-01-01T00:00:00Z') }}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        text, "the logical time must be a time such as 2024-03-01T09, as --vars '{lakehouse_patterns_logical_time: …}' "
        ~ "or in LOGICAL_TIME, got '" ~ text ~ "'"
    ) -%}
    {{ return(lakehouse_patterns._moment('the logical time', text).isoformat() ~ 'Z') }}
{% endmacro %}


{% macro _only_reads_the_sql() %}
    {{ return(flags.WHICH not in ['run', 'build', 'test', 'snapshot', 'run-operation', 'retry', 'show']) }}
{% endmacro %}
