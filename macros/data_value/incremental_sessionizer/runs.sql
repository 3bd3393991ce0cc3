{#- Incremental Sessionizer, the runs: their intervals, and the markers that say which are published. -#}

{% macro publish_session_run(pending, first_run, run=none, period='1 hour') %}
    {{ return(adapter.dispatch('publish_session_run', 'lakehouse_patterns')(pending, first_run, run, period)) }}
{% endmacro %}

{% macro default__publish_session_run(pending, first_run, run, period) %}
    {#- The statement that marks the run's completed sessions as published: only then the next run starts. -#}
    {%- set of_run = lakehouse_patterns._session_run(run, period, first_run) -%}
    {%- if not lakehouse_patterns.is_empty_run() -%}
insert into {{ pending }} by name
{{ lakehouse_patterns._published_marker_sql(pending, of_run) }}
    {%- endif -%}
{% endmacro %}


{% macro _session_run(run, period, first_run) %}
    {#- {start, end, previous, is_first, id: the start in SQL, text: for messages} of a run, by default the dbt run's. -#}
    {%- set length = lakehouse_patterns._duration('period', period) -%}
    {%- do lakehouse_patterns.require(
        length.total_seconds() > 0, "period must be longer than 0, got '" ~ period ~ "'"
    ) -%}
    {%- set first = lakehouse_patterns._moment('first_run', first_run) -%}
    {%- set start = lakehouse_patterns._moment('run', run or lakehouse_patterns.logical_time()) -%}
    {%- if start < first and not run and (not execute or lakehouse_patterns._only_reads_the_sql()) -%}
        {%- set start = first -%}
    {%- endif -%}
    {%- set epoch = modules.datetime.datetime(1970, 1, 1) -%}
    {%- for name, moment in {'first_run': first, 'run': start}.items() -%}
        {%- do lakehouse_patterns.require(
            (moment - epoch) % length == modules.datetime.timedelta(0) and moment.year < 9999,
            name ~ " must be the start of an interval of '" ~ period ~ "' before the year 9999, got '" ~ moment ~ "'"
        ) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        start >= first, "run '" ~ start ~ "' is before first_run, '" ~ first ~ "'"
    ) -%}
    {{ return({
        'start': start,
        'end': start + length,
        'previous': start - length,
        'is_first': start == first,
        'period': length,
        'id': lakehouse_patterns.timestamp_literal(start),
        'text': start.isoformat() ~ 'Z',
    }) }}
{% endmacro %}


{% macro _require_pending(pending, of_run) %}
    {%- if pending is not string and execute and not of_run.is_first -%}
        {%- do lakehouse_patterns.require(
            load_relation(pending) is not none,
            lakehouse_patterns._no_previous_run(pending, of_run) ~ ': ' ~ pending ~ ' is not there'
        ) -%}
    {%- endif -%}
{% endmacro %}


{% macro _no_previous_run(pending, of_run) %}
    {{ return(
        'the run of ' ~ of_run.text ~ ' needs the run before it, of ' ~ of_run.previous.isoformat()
        ~ 'Z, published in ' ~ pending ~ ': run that one first, or start with first_run'
    ) }}
{% endmacro %}


{% macro _is_published(pending, of_run) %}
    {#- Whether the run before is published, as a SQL condition. -#}
    {{ return(
        '(select count(*) from ' ~ pending ~ ' where run_start = '
        ~ lakehouse_patterns.timestamp_literal(of_run.previous) ~ " and status = 'published') > 0"
    ) }}
{% endmacro %}


{% macro _published_marker_sql(pending, of_run) %}
select 'published' as status, * except (status)
from {{ pending }}
where run_start = {{ of_run.id }} and status = 'computed'
{%- endmacro %}
